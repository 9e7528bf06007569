# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: venv serve servers test check nightly clean

venv: $(STAMP)

# torch goes first and alone, pinned by the constraints, so that nothing can pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

serve: venv  ## an OpenAI server on a tiny model that it makes itself; says where it is, and a curl line to try
	$(BIN)/headwater serve

check: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

servers:  ## what the tests start themselves, by Debian's names
	@{ command -v redis-server && ldconfig -p | grep -q libibverbs.so.1; } > /dev/null \
	  || { apt-get update -qq && apt-get install -qq -y redis-server libibverbs1; } \
	  || { echo "the tests need redis-server and libibverbs1; as root: apt-get install redis-server libibverbs1"; exit 1; }

test: check servers
	$(BIN)/python -m pytest

nightly: check servers  ## the long profile of every hypothesis machine and fault campaign
	HEADWATER_TEST_PROFILE=nightly $(BIN)/python -m pytest --timeout 3600

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
