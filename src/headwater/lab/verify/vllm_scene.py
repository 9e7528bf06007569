"""The scenes of `verify --vllm`: models and how vLLM keeps their KV, one engine at a time, and what a case is.

A scene is one model on one worker, with what vLLM answers without a connector. It opens engines, asks them, and judges
an answer by its tokens and by what vLLM counted.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import InvalidConfig
from headwater.lab.bench.vllm_client import EngineProcess, WorkerFailed
from headwater.lab.verify.vllm_faults import VllmFault

ROOM_BYTES: Final = 64 << 20
PROMPT_BLOCKS: Final = 8
ANSWER: Final = 24
PATIENCE_S: Final = 300.0
LOAD_S: Final = 2.0  # a load's deadline
_TAIL: Final = 5
_OPEN_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A model to be made, and how vLLM keeps its KV."""

    name: str
    family: str
    block_tokens: int
    overrides: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)  # of vLLM
    dtype: str = "float32"

    @property
    def rounds(self) -> bool:
        """Whether answers depend, in their last bits, on how many tokens are computed at once, and beside whom.

        Then a prompt is compared with what vLLM alone answers with as much of it in its own cache, and batches are not.
        """
        return self.dtype != "float32"


_SHAPE: Final[dict[str, object]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}
_MLA: Final[dict[str, object]] = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 3,
}
KINDS: Final = {
    "gqa": ModelKind("gqa", "llama", 32, {**_SHAPE, "num_key_value_heads": 2}),
    "mla": ModelKind(
        "mla",
        "deepseek_v2",
        16,  # and a latent of 576 numbers: what vLLM's kernel for CPUs takes
        _MLA,
        # That kernel of vLLM 0.32 for CPUs gives other values for one token than for several, with or without a
        # connector: nothing could be compared. This is vLLM's own switch to its plain implementation.
        {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
    ),
}
# The KV's bytes are said, and not what is left of the device: others may come and go on it meanwhile, and vLLM refuses
# to start when it measures that.
_ON_GPU: Final[dict[str, object]] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_batched_tokens": 2048,
}
CUDA_KINDS: Final = {
    "gqa": ModelKind("gqa", "llama", 32, KINDS["gqa"].overrides, {**_ON_GPU, "attention_backend": "TRITON_ATTN"}),
    "gqa-bf16": ModelKind("gqa-bf16", "llama", 16, KINDS["gqa"].overrides, _ON_GPU, "bfloat16"),
    "gqa-fp8": ModelKind(  # and the largest blocks
        "gqa-fp8", "llama", 128, KINDS["gqa"].overrides, {**_ON_GPU, "kv_cache_dtype": "fp8"}, "bfloat16"
    ),
    "mla": ModelKind(  # kernels for GPUs take these heads
        "mla",
        "deepseek_v2",
        64,
        {**_MLA, "num_attention_heads": 16, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128},
        _ON_GPU,
        "bfloat16",
    ),
}


def kinds_of(device: str) -> dict[str, ModelKind]:
    """The models that are asked on a device. Raises InvalidConfig for another one."""
    found = {"cpu": KINDS, "cuda": CUDA_KINDS}.get(device)
    if found is None:
        raise InvalidConfig(f"--device is cpu or cuda, not {device!r}")
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """Where a model's tiers are."""

    host: Path
    disk: Path
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCase:
    """One comparison. `problem` is empty where all was as it should be."""

    model: str
    case: str
    problem: str = ""
    skipped: str = ""
    cached_tokens: tuple[int, ...] = ()
    hits: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether all was as it should be; of a control: whether it differed."""
        return not self.problem


@dataclass(slots=True)
class VllmScene:
    """One model on one worker, and what it answers without a connector."""

    worker: EngineProcess
    kind: ModelKind
    places: Places
    model: Path
    right: dict[str, list[list[list[int]]]]  # of each question, all answers that are right
    inject: bool = False
    host_bytes: int = ROOM_BYTES
    disk_bytes: int = ROOM_BYTES
    other: "VllmScene | None" = None  # the same model in another process, that has the same directories
    facts: dict[str, Any] = field(default_factory=dict)

    def prompt(self, seed: str, num_blocks: int = PROMPT_BLOCKS, tail: int = _TAIL) -> list[int]:
        """Tokens that nobody has seen."""
        source = random.Random(seed)  # noqa: S311  nothing secret
        return [source.randrange(3, 256) for _ in range(num_blocks * self.kind.block_tokens + tail)]

    @property
    def alive(self) -> bool:
        """Whether the worker can be asked any more."""
        try:
            self.worker.ask("stats", timeout_s=PATIENCE_S)
        except WorkerFailed:
            return False
        return True

    def open(
        self,
        *tiers: str,
        fault: VllmFault | None = None,
        num_good: int = 0,
        load: str = "async",
        options: Mapping[str, object] | None = None,
        spoil: bool = False,
    ) -> None:
        """An engine with these tiers, in place of the one before; without any: without a connector."""
        size = self.kind.block_tokens
        engine = {
            "dtype": self.kind.dtype,
            "block_size": size,
            "max_model_len": 24 * size,
            "num_gpu_blocks_override": 128,
        }
        setup: dict[str, object] = {
            "model": str(self.model),
            "engine": {**engine, **self.kind.options, **(options or {})},
        }
        if load == "sync":
            setup["engine"] = {**engine, **self.kind.options, **(options or {}), "async_scheduling": False}
            setup["runner_v1"] = True  # V2 cannot take back a load that failed: our connector refuses it
        if (spoil or self.inject) and fault is None and tiers:
            fault = VllmFault.SPOIL
        if tiers:
            setup["transfer"] = self._transfer(tiers, load, threads=fault is not None)
        self.facts = self.worker.ask("open", timeout_s=_OPEN_S, setup=setup, fault=fault, num_good=num_good)

    def _transfer(self, tiers: tuple[str, ...], load: str, *, threads: bool) -> dict[str, object]:
        """`threads`: in the engine's process, where faults are injected."""
        places = self.places
        extra: dict[str, object] = {
            "host_directory": None,
            "disk_directory": None,
            "load": load,
            "load_timeout_s": LOAD_S,
            "load_when": "always",
        }
        if threads:
            extra["executor"] = "threads"
        extra["probe_timeout_s"] = 2.0  # others compute on this machine
        if "host" in tiers:
            extra |= {"host_directory": str(places.host), "host_bytes": self.host_bytes}
        if "disk" in tiers:
            extra |= {"disk_directory": str(places.disk), "disk_bytes": self.disk_bytes}
        if "pool" in tiers:
            extra["pool"] = places.pool
        return {
            "kv_connector": "HeadwaterConnector",
            "kv_connector_module_path": "headwater.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def ask(self, *prompts: list[int], max_tokens: int = ANSWER, give_up_s: float = PATIENCE_S) -> dict[str, Any]:
        """Compute all of these at once."""
        return self.worker.ask(
            "ask", timeout_s=give_up_s + PATIENCE_S, prompts=prompts, max_tokens=max_tokens, give_up_s=give_up_s
        )

    def settle(self) -> None:
        """All that was computed is in the stores, and vLLM's own cache is empty. Raises HeadwaterError."""
        said = self.worker.ask("settle", timeout_s=PATIENCE_S)
        if not (said["settled"] and said["reset"]):
            raise WorkerFailed(f"vLLM did not come to rest: {said}")

    def case(self, name: str, said: Mapping[str, Any], right: str, *, differ: bool = False, **wanted: Any) -> VllmCase:
        """Compare. `wanted`: cached (tokens of each request), hits (tokens by source), and the first problem if any."""
        counted = said["counted"]
        hits = {
            key.removeprefix("source "): int(value)
            for key, value in counted.items()
            if key.startswith("source ") and value
        }
        equal = said["tokens"] in self.right.get(right, ())
        problem = wanted.get("problem") or ""
        if right not in self.right:
            problem = "there is nothing to compare with"
        elif not said["over"]:
            problem = f"it did not end in {said['seconds']:.0f} s"
        elif not differ and not equal:
            problem = "other tokens"
        elif differ and equal:
            problem = "damaged bytes gave the same tokens: the comparison proves nothing"
        elif not problem and "cached" in wanted and set(said["cached_tokens"]) != {wanted["cached"]}:
            problem = f"vLLM counted {said['cached_tokens']} cached tokens, not {wanted['cached']}"
        elif not problem and "hits" in wanted and hits != wanted["hits"]:
            problem = f"hits were {hits}, not {wanted['hits']}"
        return VllmCase(
            model=self.kind.name,
            case=name,
            problem=problem,
            cached_tokens=tuple(said["cached_tokens"]),
            hits=hits,
            preemptions=int(counted.get("num_preemptions", 0)),
            seconds=round(said["seconds"], 3),
        )

    def skipped(self, name: str, why: str) -> VllmCase:
        """A case that vLLM cannot do."""
        return VllmCase(model=self.kind.name, case=name, skipped=why)
