"""What "Coming from FastDeploy" says of Headwater is so, and nothing on the list of FastDeploy's names is left out.

In every table of the page the first column holds FastDeploy's names; all code elsewhere is ours, and is looked up. On
the page it leads to, about prefill and decode apart, all code is ours.
"""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import typer

from headwater.cli import app
from headwater.config.environment import index_only, pd_via, write_config
from headwater.config.serve import ServeConfig
from headwater.metrics import FAMILIES
from headwater.router.settings import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headwater"
PAGE = (ROOT / "docs" / "FROM_FASTDEPLOY.md").read_text()
APART = (ROOT / "docs" / "DISAGG.md").read_text()
CONFIG = "".join(path.read_text() for path in sorted((SOURCE / "config").glob("*.py")))

# What somebody who used FastDeploy may have set, read or met: its options, variables, tasks, calls and numbers.
NAMES = """
--enable-prefix-caching --enable-output-caching --kvcache-storage-backend --write-policy --swap-space --block-size
--num-gpu-blocks-override --gpu-memory-utilization --kv-cache-ratio --prealloc-dec-block-slot-num-threshold
--static-decode-blocks --cache-queue-port --splitwise-role --cache-transfer-protocol --pd-comm-port --rdma-comm-ports
--router --disable-chunked-mm-input --max-encoder-cache --max-processor-cache --speculative-config

FD_AS_ONLY_FLUSH FD_PD_TRANSFER_VIA_STORAGE AS_WRITE_TOTAL_TIMEOUT AS_WRITE_SLICE_BLOCK_NUM AS_WRITE_SLICE_TIMEOUT
AS_NAMESPACE AS_POD_NAME AS_MODEL_VERSION ENABLE_EP_DP_IN_FD MOONCAKE_CONFIG_PATH MOONCAKE_LOCAL_HOSTNAME
MOONCAKE_METADATA_SERVER MOONCAKE_MASTER_SERVER_ADDR MOONCAKE_GLOBAL_SEGMENT_SIZE MOONCAKE_LOCAL_BUFFER_SIZE
MOONCAKE_PROTOCOL MOONCAKE_RDMA_DEVICES FILE_BACKEND_STORAGE_DIR ENABLE_V1_KVCACHE_SCHEDULER ENABLE_V1_KVCACHE_MANAGER
FD_ENC_DEC_BLOCK_NUM FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST FD_ENABLE_SWAP_SPACE_CLEARING FD_USE_KVCACHE_LOCK
FD_CACHE_PROC_EXIT_TIMEOUT FD_CACHE_PROC_ERROR_COUNT FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS
PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES FD_GET_FIRST_TOKEN_FROM_P_TIMEOUT FD_ENABLE_CACHE_TASK
FD_PREFILL_PREPARE_REQ_THREAD_NUM FD_ENABLE_PD_RDMA_EAGER_CONNECT FD_ENABLE_INTERNAL_ADAPTER
FD_ENGINE_TASK_QUEUE_WITH_SHM FD_RESERVE_* FD_USE_NEW_TOKEN_RATIO_RESERVE FD_ATTENTION_BACKEND
FD_DISABLE_CHUNKED_PREFILL FD_DETERMINISTIC_MODE FD_ENABLE_V1_UPDATE_WEIGHTS KVCACHE_RDMA_NICS KVCACHE_RDMA_GID_INDEX
KVCACHE_IB_TIMEOUT KVCACHE_RELAX_ORDERING KVCACHE_GDRCOPY_FLUSH_ENABLE KVCACHE_DEBUG KVCACHE_SOCKET_IFNAME
KVCACHE_DEBUG_FILE KVCACHE_ERROR_FILE

task_id keys token_ids gpu_block_ids ReadStorageTask WriteStorageTask start_read_block_idx start_write_block_idx timeout
flush_cache_exists SWAP2CPU SWAP2GPU STORAGE2GPU GPU2STORAGE CTRL StorageMetadata PDTransferMetadata CacheSwapMetadata
TransferResult AsyncTaskHandler StorageConfig TransferConfig finished_req EngineCacheQueue IPCSignal
CacheTransferManager CacheMessager PrefixCacheManager PendingPrefetch LayerDoneCounter cache_sync

Tokens match read write flush_token_index wait_for_sdk_ready namespace pod_name model_version shard_id shard_num
layer_num bytes_per_shard_layer_per_block attention_type dp_id splitwise_role get batch_get set batch_set exists query
clear register_buffer key_prefix key_scale value_scale version.yaml swap_cache_layout cache_gpu_tensors cache_cpu_ptr
cpu_block_ids create_kv_cache create_host_kv_cache free_host_kv_cache layer_offset num_cpu_blocks int4_zp
block_wise_fp8 MLA DSA MTP partial 500 501 502

gpu_cache_usage_perc available_gpu_block_num free_gpu_block_num max_gpu_block_num max_cpu_block_num
available_gpu_resource hit_req_rate hit_token_rate cpu_hit_token_rate gpu_hit_token_rate num_requests_running
num_requests_waiting num_requests_queuing batch_size max_batch_size available_batch_size decode_preallocated_req_num
cache_config_info prefix_cache_token_num prefix_gpu_cache_token_num prefix_cpu_cache_token_num
prefix_ssd_cache_token_num send_cache_failed_num reschedule_req_num failed_recv_first_token_req_num gpu_cache_token_num
cpu_cache_token_num storage_cache_token_num cpu_cache_prepare_time storage_cache_prepare_time
wait_for_sending_cache_time send_request_output_to_decode_time preempted_count
"""


def _rows() -> Iterator[list[str]]:
    """The cells of every row of every table, without heads."""
    for block in re.findall(r"(?:^\|.*\|\n)+", PAGE, re.MULTILINE):
        head, rule, *rows = block.splitlines()
        assert head.startswith("| FastDeploy |"), f"the first column is FastDeploy's: {head}"
        assert re.fullmatch(r"[|-]+", rule)
        for row in rows:
            cells = [cell.strip() for cell in row.strip("|").split(" | ")]
            assert len(cells) == head.count("|") - 1, row
            yield cells


ROWS = list(_rows())
THEIRS = "\n".join(cells[0] for cells in ROWS)


def _code(*texts: str) -> list[str]:
    """All code in some texts that is not in a fenced block."""
    plain = [re.sub("^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
    return sorted({one for text in plain for one in re.findall("`([^`\n]+)`", text)})


def _ours() -> list[str]:
    """All code of the page that is not in a first column."""
    prose = re.sub(r"^\|.*\|$", "", PAGE, flags=re.MULTILINE)
    return _code(prose, *chain(*(cells[1:] for cells in ROWS)))


@cache
def _source() -> str:
    return "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))


@cache
def _definitions() -> dict[str, list[str]]:
    """By name of a class or function, the files that define one."""
    found: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for name in set(re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE)):
            found.setdefault(name, []).append(text)
    return found


_parse = cache(ast.parse)


@cache
def _members(name: str) -> frozenset[str]:
    """Everything that classes and functions of a name have: fields, methods, parameters, and what they inherit."""
    found: set[str] = set()
    for text in _definitions().get(name, []):
        for node in ast.walk(_parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                found.add(name)
                found.update(_said_in(node))
                bases = node.bases if isinstance(node, ast.ClassDef) else []
                found.update(*(_members(base.id) for base in bases if isinstance(base, ast.Name) and base.id != name))
    return frozenset(found)


def _said_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            yield inner.arg
        elif isinstance(inner, ast.FunctionDef):
            yield inner.name
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self":
            yield inner.attr


# --- whether what is called ours exists, by what it looks like --------------------------------------------------------


@cache
def _app() -> Any:
    return typer.main.get_command(app)


def _command(said: str) -> bool:
    """`headwater serve --role`: such a command has such options. `--role`: any command has."""
    commands = [_app()]
    words = said.split()
    if words[0] == "headwater":
        words.pop(0)
        while hasattr(commands[0], "commands") and words[0] in commands[0].commands:
            commands = [commands[0].commands[words.pop(0)]]
        if hasattr(commands[0], "commands"):  # it stands for commands, and is none
            return False
    for command in commands:
        commands.extend(getattr(command, "commands", {}).values())
    known = {
        option
        for command in commands
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return {word for word in words if word.startswith("-")} <= known | {"--help"}


def _test(file: str, name: str) -> bool:
    found = [*(ROOT / "tests").glob(f"*/{file}")]
    return len(found) == 1 and f"def {name}(" in found[0].read_text()


def _metric(name: str, labels: str = "") -> bool:
    return name in FAMILIES and (not labels or FAMILIES[name].labels == tuple(labels.split(",")))


def _member(name: str, attribute: str) -> bool:
    return attribute in _members(name)


def _call(name: str, arguments: str) -> bool:
    """`match(tokens, start_block=...)`: something of this name takes these."""
    return {name, *re.findall(r"[a-z_]+(?=[,=]|$)", arguments)} <= _members(name)


LOOKS: dict[str, Callable[..., bool]] = {
    r"((?:headwater |--).*)": _command,
    r"make (\w+)": lambda target: re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None,
    r"\$?((?:HEADWATER|FD|AS|ENABLE|MOONCAKE|KVCACHE)_\w+)(?:=\w+)?": lambda variable: f'"{variable}"' in CONFIG,
    r"(test_\w+\.py)::(test_\w+)": _test,
    r"((?:\w+/)+\w+\.py)": lambda path: (SOURCE / path).exists() or (ROOT / path).exists(),
    r"((?:\w+/)+)": lambda path: (SOURCE / path).is_dir() or (ROOT / path).is_dir(),
    r"(\w+)\{([\w,]+)\}": _metric,
    r"(\w+_(?:total|seconds))": _metric,
    r"([A-Z]\w*[a-z]\w*)\.(\w+)": _member,
    r"([A-Z]\w*[a-z]\w*)": lambda name: name in _definitions(),
    r"(\w+)\((.*)\)": _call,
    r"(.+?)(?:\.\.\.)?": lambda text: text in _source(),
}


def _exists(span: str) -> bool:
    for pattern, there in LOOKS.items():
        found = re.fullmatch(pattern, span)
        if found is not None:
            return there(*found.groups())
    raise AssertionError(f"nothing looks like {span!r}")


@pytest.mark.parametrize(("ours", "least"), [(_ours(), 200), (_code(APART), 60)], ids=["from_fastdeploy", "disagg"])
def test_what_is_called_ours_exists(ours: list[str], least: int) -> None:
    assert len(ours) > least
    assert not (missing := [span for span in ours if not _exists(span)]), "; ".join(missing)


@pytest.mark.parametrize("page", [PAGE, APART], ids=["from_fastdeploy", "disagg"])
def test_lines_to_copy_can_be_run(page: str) -> None:
    lines = re.findall(r"^(headwater .*?|make \w+) *(?:&|#.*)?$", page, re.MULTILINE)
    assert len(lines) >= 4
    assert not (missing := [line for line in lines if not _exists(line)]), "; ".join(missing)


@pytest.mark.parametrize(
    "missing",
    [
        [
            "headwater fly",
            "headwater bench fly",
            "headwater serve --fly",
            "headwater bench --json",
            "--fly",
            "make cheese",
        ],
        ["HEADWATER_FLY", "FD_USE_KVCACHE_LOCK", "AS_NAMESPACE", "MOONCAKE_PROTOCOL", "wings_of_a_cache", "kill -99"],
        ["test_keys.py::test_no_such", "test_no_such.py::test_golden_values", "core/fly.py", "wings/"],
        ["hit_tokens_total{store}", "hit_tokens_total{}", "flown_seconds", "flown_total"],
        ["FlyingCache", "TierConfig.wings", "match(tokens, wings=...)", "Extra(kind, wings)", "fly(tokens)"],
    ],
    ids=["commands", "words", "files", "metrics", "classes"],
)
def test_what_does_not_exist_would_be_noticed(missing: list[str]) -> None:
    assert [span for span in missing if _exists(span)] == []


# --- whether anything was left out ------------------------------------------------------------------------------------


def test_every_name_of_theirs_has_a_row() -> None:
    names = NAMES.split()
    assert [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", THEIRS)] == []


def test_every_row_says_what_it_is_here_or_why_not() -> None:
    for theirs, here, *_ in ROWS:
        assert theirs, here
        assert here, f"{theirs} has no answer"
        if here.startswith("not here"):
            assert re.match(r"not here, because \S+( \S+){2,}", here), f"{theirs}: why is it not here?"
        if here.startswith("not needed"):
            assert re.match(r"not needed: \S+", here), f"{theirs}: why is it not needed?"


def test_aliases_are_those_that_are_read() -> None:
    (table,) = re.findall(r"^\| FastDeploy \| here \| unless told \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    aliases = dict(re.findall(r"^\| `(\w+)` \| `(HEADWATER_\w+)`", table, re.MULTILINE))
    assert len(aliases) == table.count("\n")
    assert set(aliases) == set(re.findall(r'"((?:FD|AS)_\w+)"', CONFIG))
    for alias, name in aliases.items():
        if "_WRITE_" in alias:
            assert write_config({alias: "7"}) == write_config({name: "7"}) != write_config({})
    assert index_only({"FD_AS_ONLY_FLUSH": "1"}) is index_only({aliases["FD_AS_ONLY_FLUSH"]: "1"}) is True
    via = {text: pd_via({"FD_PD_TRANSFER_VIA_STORAGE": text}) for text in ("0", "1")}
    assert via == {"0": "direct", "1": pd_via({aliases["FD_PD_TRANSFER_VIA_STORAGE"]: "pool"})}


def test_times_and_limits_are_those_that_are_kept() -> None:
    kept = {
        one.name: one.default
        for config in (ServeConfig, RouterConfig)
        for one in dataclasses.fields(config)
        if isinstance(one.default, int | float)
    }
    told = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|[^|]*\| ([\d., s]+) \|", APART, re.MULTILINE)
    assert len(told) >= 10
    for names, values in told:
        numbers = [float(value.removesuffix(" s")) for value in values.split(", ")]
        assert [kept[name] for name in re.findall(r"\w+", names)] == numbers, names


@pytest.mark.parametrize("page", [PAGE, APART], ids=["from_fastdeploy", "disagg"])
def test_links_to_headings_lead_somewhere(page: str) -> None:
    headings = re.findall("^#+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= anchors
