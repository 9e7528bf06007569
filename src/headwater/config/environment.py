"""The only place that reads the environment: what is used where nobody said otherwise, by variable."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headwater.config.writes import WriteConfig
from headwater.core.errors import InvalidConfig

log: Final = logging.getLogger("headwater")

INDEX_ONLY: Final = "HEADWATER_INDEX_ONLY"
INDEX_ONLY_ALIAS: Final = "FD_AS_ONLY_FLUSH"  # what FastDeploy's users know it by
PD_VIA: Final = "HEADWATER_PD_VIA"
PD_VIA_ALIAS: Final = "FD_PD_TRANSFER_VIA_STORAGE"  # the same
POOL_WAY: Final = "pool"  # how KV goes from prefill to decode: the only way yet


# Our names first: if both are set, they win.
_WRITE_VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    "slice_blocks": ("HEADWATER_WRITE_SLICE_BLOCKS", "AS_WRITE_SLICE_BLOCK_NUM"),
    "slice_timeout_s": ("HEADWATER_WRITE_SLICE_TIMEOUT_S", "AS_WRITE_SLICE_TIMEOUT"),
    "total_timeout_s": ("HEADWATER_WRITE_TOTAL_TIMEOUT_S", "AS_WRITE_TOTAL_TIMEOUT"),
}


def write_config(
    environ: Mapping[str, str] = os.environ,
    *,
    slice_blocks: int | None = None,
    slice_timeout_s: float | None = None,
    total_timeout_s: float | None = None,
) -> WriteConfig:
    """Slices as the options say, where they are None as the environment does, else by default. Read once, at start.

    Raises InvalidConfig with the variable's name for 0, negative numbers and nonsense.
    """
    options = {"slice_blocks": slice_blocks, "slice_timeout_s": slice_timeout_s, "total_timeout_s": total_timeout_s}
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, variables in _WRITE_VARIABLES.items():
        found = [(variable, environ[variable]) for variable in variables if environ.get(variable)]
        if name in chosen or not found:
            continue
        (variable, text), *others = found
        for other, ignored in others:
            if ignored != text:
                log.warning("%s=%s counts, and %s=%s does not", variable, text, other, ignored)
        chosen[name] = _number(variable, text, whole=name == "slice_blocks")
    return WriteConfig(**chosen)


def _number(variable: str, text: str, *, whole: bool) -> float:
    """A positive number from the environment. Raises InvalidConfig that names the variable."""
    try:
        plain = re.fullmatch(r"\s*[0-9.]+(e[-+]?[0-9]+)?\s*", text, re.IGNORECASE)  # no "inf", "nan", "1_000"
        value = (int if whole else float)(text) if plain else 0
    except ValueError:
        value = 0
    if not 0 < value < (1 << 62 if whole else float("inf")):
        kind = "whole number" if whole else "number of seconds"
        raise InvalidConfig(f"{variable} must be a positive {kind}, not {text!r}")
    return value


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Ours in the user's cache directory: models made here, digests of weights, stores in folders of their own."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the commands look for a store: `HEADWATER_DIR`, or a folder of its own, which holds nothing else."""
    return Path(environ.get("HEADWATER_DIR") or cache_directory(environ) / "store")


def default_vllm_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where vLLM's connector keeps its disk tier: a folder in `HEADWATER_DIR`, or beside that of `headwater serve`."""
    return Path(environ.get("HEADWATER_DIR") or cache_directory(environ)) / "vllm"


def default_host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `headwater serve` keeps its host tier: `HEADWATER_HOST_DIR`, or a folder of the user's on tmpfs."""
    return Path(environ.get("HEADWATER_HOST_DIR") or f"/dev/shm/headwater-{os.geteuid()}")  # noqa: S108  checked when opened


def default_pool_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `headwater pool` writes down what it started: the user's runtime directory, or one of theirs in /tmp."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "headwater-pool" if base else Path(f"/tmp/headwater-pool-{os.geteuid()}")  # noqa: S108  checked when used


def default_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key that clients must show: `HEADWATER_API_KEY`; none where that is missing. Raises InvalidConfig.

    One that is empty is refused: a secret that was not found must not open the server.
    """
    key = environ.get("HEADWATER_API_KEY")
    if key == "":
        raise InvalidConfig("HEADWATER_API_KEY is empty: set it to a key, or unset it to want none")
    return key


def default_node(environ: Mapping[str, str] = os.environ) -> str:
    """What this process is called in the cluster: `HEADWATER_NODE`, or the machine's name and the process' number."""
    return environ.get("HEADWATER_NODE") or f"{os.uname().nodename}:{os.getpid()}"


def default_pool(environ: Mapping[str, str] = os.environ) -> str | None:
    """Which pool is shared with others: `HEADWATER_POOL`; none where that is empty or missing."""
    return environ.get("HEADWATER_POOL") or None


def default_residency(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where the residency index is: `HEADWATER_RESIDENCY`; none where that is empty or missing."""
    return environ.get("HEADWATER_RESIDENCY") or None


def default_traces(environ: Mapping[str, str] = os.environ) -> str | None:
    """The OpenTelemetry collector that is told of requests: `HEADWATER_TRACES`; none where that is empty or missing."""
    return environ.get("HEADWATER_TRACES") or None


def index_only(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether no data goes to or comes from the pool, and only the residency index is kept: `HEADWATER_INDEX_ONLY`.

    `FD_AS_ONLY_FLUSH` is taken for it. Raises InvalidConfig for anything but 0 and 1, and where the two disagree.
    """
    said: dict[str, bool] = {}
    for name in (INDEX_ONLY, INDEX_ONLY_ALIAS):
        text = environ.get(name, "").strip()
        if text and text not in ("0", "1"):
            raise InvalidConfig(f"{name} must be 0 or 1, not {text!r}")
        if text:
            said[name] = text == "1"
    if len(set(said.values())) > 1:
        raise InvalidConfig(f"{' and '.join(f'{name}={value:d}' for name, value in said.items())}: which of them?")
    return any(said.values())


def pd_via(environ: Mapping[str, str] = os.environ) -> str:
    """How KV goes from prefill to decode: `HEADWATER_PD_VIA`, which is checked where it is used.

    `FD_PD_TRANSFER_VIA_STORAGE=1` is taken for `pool`, 0 for `direct`. Raises InvalidConfig where the two disagree.
    """
    alias = environ.get(PD_VIA_ALIAS, "").strip()
    if alias not in ("", "0", "1"):
        raise InvalidConfig(f"{PD_VIA_ALIAS} must be 0 or 1, not {alias!r}")
    said = {PD_VIA: environ.get(PD_VIA, "").strip(), PD_VIA_ALIAS: {"1": POOL_WAY, "0": "direct"}.get(alias, "")}
    ways = {way for way in said.values() if way}
    if len(ways) > 1:
        raise InvalidConfig(f"{PD_VIA}={said[PD_VIA]} and {PD_VIA_ALIAS}={alias}: which of them?")
    return ways.pop() if ways else POOL_WAY


def default_node_key_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file with the key of a fleet's routers and nodes: `HEADWATER_NODE_KEY_FILE`; none where that is missing.

    Raises InvalidConfig where the key itself is named too.
    """
    named = environ.get("HEADWATER_NODE_KEY_FILE")
    if named and environ.get("HEADWATER_NODE_KEY"):
        raise InvalidConfig("HEADWATER_NODE_KEY_FILE and HEADWATER_NODE_KEY: which of them?")
    return Path(named) if named else None


def default_node_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key itself: `HEADWATER_NODE_KEY`; none where that is empty or missing."""
    return environ.get("HEADWATER_NODE_KEY") or None


def default_vllm_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """What a vLLM server wants to be shown: `HEADWATER_VLLM_KEY`; none where that is empty or missing."""
    return environ.get("HEADWATER_VLLM_KEY") or None


def own_node_key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's own key is kept, for fleets that are given none."""
    base = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "headwater" / "node.key"
