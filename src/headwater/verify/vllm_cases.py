"""The cases of `verify --vllm`: how each is brought about in an engine, and what shows that it was.

Cases run in order: the first saves what others load. A case compares tokens with those of an engine without a
connector, and then looks at what vLLM counted: a hit from somewhere else, or a preemption that did not happen, is a
problem as much as another token.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.bench.vllm_client import Worker, WorkerFailed
from headwater.core.errors import HeadwaterError
from headwater.verify.vllm_faults import Fault

ROOM_BYTES: Final = 64 << 20
_PROMPT_BLOCKS: Final = 8
_TAIL: Final = 5
_ANSWER: Final = 24
_BATCH: Final = 8
_OPEN_S: Final = 600.0
LOAD_S: Final = 2.0  # a load's deadline, and
DEADLINE_S: Final = 60.0  # for a request whose load fails: that, what vLLM makes of it, and computing on a busy machine
_PATIENCE_S: Final = 300.0
_CHUNK_BLOCKS: Final = 2
_LOADED: Final = 'headwater jobs_total{tier="host",job="load",outcome="done"}'
_MISSED: Final = "headwater miss_tokens_total"


@dataclass(frozen=True, slots=True)
class Kind:
    """A model to be made, and how vLLM keeps its KV."""

    name: str
    family: str
    block_tokens: int
    overrides: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)  # of vLLM


_SHAPE: Final[dict[str, object]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}
KINDS: Final = {
    "gqa": Kind("gqa", "llama", 32, {**_SHAPE, "num_key_value_heads": 2}),
    "mla": Kind(
        "mla",
        "deepseek_v2",
        16,  # and a latent of 576 numbers: what vLLM's kernel for CPUs takes
        {
            **_SHAPE,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 3,
        },
        # That kernel of vLLM 0.32 for CPUs gives other values for one token than for several, with or without a
        # connector: nothing could be compared. This is vLLM's own switch to its plain implementation.
        {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
    ),
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where a model's tiers are."""

    host: Path
    disk: Path
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
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
class Scene:
    """One model on one worker, and what it answers without a connector."""

    worker: Worker
    kind: Kind
    places: Places
    model: Path
    right: dict[str, list[list[int]]]
    inject: bool = False
    disk_bytes: int = ROOM_BYTES
    facts: dict[str, Any] = field(default_factory=dict)

    def prompt(self, seed: str, num_blocks: int = _PROMPT_BLOCKS, tail: int = _TAIL) -> list[int]:
        """Tokens that nobody has seen."""
        source = random.Random(seed)  # noqa: S311  nothing secret
        return [source.randrange(3, 256) for _ in range(num_blocks * self.kind.block_tokens + tail)]

    @property
    def alive(self) -> bool:
        """Whether the worker can be asked any more."""
        try:
            self.worker.ask("stats", timeout_s=_PATIENCE_S)
        except WorkerFailed:
            return False
        return True

    def open(
        self,
        *tiers: str,
        fault: Fault | None = None,
        num_good: int = 0,
        load: str = "async",
        options: Mapping[str, object] | None = None,
        spoil: bool = False,
    ) -> None:
        """An engine with these tiers, in place of the one before; without any: without a connector."""
        size = self.kind.block_tokens
        engine = {"dtype": "float32", "block_size": size, "max_model_len": 24 * size, "num_gpu_blocks_override": 128}
        setup: dict[str, object] = {
            "model": str(self.model),
            "engine": {**engine, **self.kind.options, **(options or {})},
        }
        if tiers:
            setup["transfer"] = self._transfer(tiers, load)
        if (spoil or self.inject) and fault is None and tiers:
            fault = Fault.SPOIL
        self.facts = self.worker.ask("open", timeout_s=_OPEN_S, setup=setup, fault=fault, num_good=num_good)

    def _transfer(self, tiers: tuple[str, ...], load: str) -> dict[str, object]:
        places = self.places
        extra: dict[str, object] = {
            "host_directory": None,
            "disk_directory": None,
            "load": load,
            "load_timeout_s": LOAD_S,
            "load_when": "always",
        }
        extra["look_timeout_s"] = 2.0  # others compute on this machine
        if "host" in tiers:
            extra |= {"host_directory": str(places.host), "host_bytes": ROOM_BYTES}
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

    def ask(self, *prompts: list[int], max_tokens: int = _ANSWER, give_up_s: float = _PATIENCE_S) -> dict[str, Any]:
        """Compute all of these at once."""
        return self.worker.ask(
            "ask", timeout_s=give_up_s + _PATIENCE_S, prompts=prompts, max_tokens=max_tokens, give_up_s=give_up_s
        )

    def settle(self) -> None:
        """All that was computed is in the stores, and vLLM's own cache is empty. Raises HeadwaterError."""
        said = self.worker.ask("settle", timeout_s=_PATIENCE_S)
        if not (said["settled"] and said["reset"]):
            raise WorkerFailed(f"vLLM did not come to rest: {said}")

    def case(self, name: str, said: Mapping[str, Any], right: str, *, differ: bool = False, **wanted: Any) -> Case:
        """Compare. `wanted`: cached (tokens of each request), hits (tokens by source), and the first problem if any."""
        counted = said["counted"]
        hits = {
            key.removeprefix("source "): int(value)
            for key, value in counted.items()
            if key.startswith("source ") and value
        }
        equal = said["tokens"] == self.right.get(right)
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
        return Case(
            model=self.kind.name,
            case=name,
            problem=problem,
            cached_tokens=tuple(said["cached_tokens"]),
            hits=hits,
            preemptions=int(counted.get("num_preemptions", 0)),
            seconds=round(said["seconds"], 3),
        )

    def skipped(self, name: str, why: str) -> Case:
        """A case that vLLM cannot do."""
        return Case(model=self.kind.name, case=name, skipped=why)


def _whole(scene: Scene) -> int:
    return _PROMPT_BLOCKS * scene.kind.block_tokens


def _prefixes(scene: Scene) -> list[list[int]]:
    return [scene.prompt(f"prefix {at}", num_blocks=4, tail=0) for at in range(2)]


def _eight(scene: Scene) -> list[list[int]]:
    """Prompts that share one of two prefixes; each has a tail of its own, of another length."""
    prefixes = _prefixes(scene)
    return [prefixes[at % 2] + scene.prompt(f"tail {at}", num_blocks=at % 3, tail=_TAIL + at) for at in range(_BATCH)]


def _three(scene: Scene) -> list[list[int]]:
    return [scene.prompt(f"long {at}", num_blocks=3) for at in range(3)]


def _half(scene: Scene) -> list[int]:
    """A prompt of which the first half is that of the usual one."""
    return scene.prompt("usual")[: _whole(scene) // 2] + scene.prompt("other half")


def _cold(scene: Scene) -> Case:
    """Ask everything without a connector; then the first time with one."""
    scene.open()
    asked = {"usual": [scene.prompt("usual")], "eight": _eight(scene), "half": [_half(scene)]}
    for name, prompts in asked.items():
        scene.right[name] = scene.ask(*prompts)["tokens"]
        scene.settle()
    scene.right["three"] = scene.ask(*_three(scene), max_tokens=_long(scene))["tokens"]
    if any(len(tokens) < _ANSWER for answers in scene.right.values() for tokens in answers):
        raise HeadwaterError("vLLM without a connector did not answer")
    scene.open("host", "disk", "pool")
    return scene.case("cold", scene.ask(*asked["usual"]), "usual", cached=0, hits={})


def _local(scene: Scene) -> Case:
    if not scene.facts["prefix_caching"]:
        return scene.skipped("local hit", "vLLM switches its own prefix cache off for this model")
    said = scene.ask(scene.prompt("usual"))
    return scene.case("local hit", said, "usual", cached=_whole(scene), hits={"device": _whole(scene)})


def _host(scene: Scene) -> Case:
    scene.settle()
    said = scene.ask(scene.prompt("usual"))
    return scene.case("host", said, "usual", cached=_whole(scene), hits={"host": _whole(scene)})


def _batch(scene: Scene) -> Case:
    """Two prefixes are in the stores, and nowhere else; then eight prompts at once."""
    for prefix in _prefixes(scene):
        scene.ask([*prefix, 3])
    scene.settle()
    prefix_tokens = 4 * scene.kind.block_tokens
    said = scene.ask(*_eight(scene))
    case = scene.case("batch of 8", said, "eight", cached=prefix_tokens)
    loaded = sum(num for source, num in case.hits.items() if source != "device")
    if case.equal and loaded < 2 * prefix_tokens:
        return scene.case("batch of 8", said, "eight", problem=f"the prefixes were not loaded: {case.hits}")
    return case


def _tier(scene: Scene, name: str, source: str, *tiers: str, load: str = "async") -> Case:
    """The usual prompt from the first of some tiers, in a new engine."""
    scene.open(*tiers, load=load)
    said = scene.ask(scene.prompt("usual"))
    return scene.case(name, said, "usual", cached=_whole(scene), hits={source: _whole(scene)})


def _failing(scene: Scene, name: str, fault: Fault, load: str, num_good: int = _PROMPT_BLOCKS // 2) -> Case:
    """The first blocks arrive, the rest does not; it has to end by its deadline, and right.

    Where not even the first arrives vLLM asks again what is there: a connector that still promised it would never end.
    """
    scene.open("host", fault=fault, load=load, num_good=num_good)
    said = scene.ask(scene.prompt("usual"), give_up_s=DEADLINE_S)
    counted = said["counted"]
    least = (_PROMPT_BLOCKS - num_good) * scene.kind.block_tokens
    missed = sum(int(value) for key, value in counted.items() if key.startswith(_MISSED) and "never" not in key)
    problem = ""
    if counted.get("external_prefix_cache_hits", 0) != _whole(scene):
        problem = f"vLLM was not promised the whole prompt once: {counted}"
    elif missed < least or (missed > least and fault is not Fault.HANG):
        problem = f"{missed} tokens failed to load, not {least}: {counted}"
    return scene.case(f"{name}, {load}", said, "usual", problem=problem)


def _chunked(scene: Scene) -> Case:
    """Half of a long prompt is loaded, the rest is computed in several steps."""
    name = "chunked prefill"
    scene.open("host", options={"max_num_batched_tokens": _CHUNK_BLOCKS * scene.kind.block_tokens})
    if not scene.facts["chunked_prefill"]:
        return scene.skipped(name, "vLLM does not compute this model's prompts in parts")
    said = scene.ask(_half(scene))
    least = (_PROMPT_BLOCKS + _PROMPT_BLOCKS // 2) // _CHUNK_BLOCKS - _PROMPT_BLOCKS // 2 // _CHUNK_BLOCKS
    problem = f"it took {said['steps_to_first']} steps" if said["steps_to_first"] < least else ""
    half = _whole(scene) // 2
    return scene.case(name, said, "half", cached=half, hits={"host": half}, problem=problem)


def _long(scene: Scene) -> int:
    return 3 * scene.kind.block_tokens


def _preempted(scene: Scene) -> Case:
    """Three requests whose answers do not all fit."""
    size = scene.kind.block_tokens
    scene.open("host", options={"num_gpu_blocks_override": 14, "max_model_len": 12 * size, "max_num_seqs": 4})
    said = scene.ask(*_three(scene), max_tokens=_long(scene))
    counted = said["counted"]
    problem = "" if counted.get("num_preemptions", 0) else "nothing was preempted"
    if not problem and not counted.get(_LOADED, 0):
        problem = f"what was preempted was not loaded again: {counted}"
    return scene.case("preemption", said, "three", problem=problem)


def _control(scene: Scene) -> Case:
    """A hit whose bytes are damaged behind all checks."""
    scene.open("host", spoil=True)
    said = scene.ask(scene.prompt("usual"))
    return scene.case("control", said, "usual", differ=True, cached=_whole(scene), hits={"host": _whole(scene)})


Cases = Mapping[str, Callable[[Scene], Case]]

FIRST: Final[Cases] = {  # what runs in the first process, in order
    "cold": _cold,
    "local hit": _local,
    "host": _host,
    "batch of 8": _batch,
    "disk": lambda scene: _tier(scene, "disk", "disk", "disk"),
    "load fails half-way, sync": lambda scene: _failing(scene, "load fails half-way", Fault.FAIL, "sync"),
    "load fails half-way, async": lambda scene: _failing(scene, "load fails half-way", Fault.FAIL, "async"),
    "load fails at once, sync": lambda scene: _failing(scene, "load fails at once", Fault.FAIL, "sync", 0),
    "load fails at once, async": lambda scene: _failing(scene, "load fails at once", Fault.FAIL, "async", 0),
    "load hangs half-way, sync": lambda scene: _failing(scene, "load hangs half-way", Fault.HANG, "sync"),
    "load hangs half-way, async": lambda scene: _failing(scene, "load hangs half-way", Fault.HANG, "async"),
    "damaged pages, async": lambda scene: _failing(scene, "damaged pages", Fault.DAMAGE, "async"),
    "sync load": lambda scene: _tier(scene, "sync load", "host", "host", load="sync"),
    "chunked prefill": _chunked,
    "preemption": _preempted,
    "control": _control,
}
LATER: Final[Cases] = {  # and in the second, when the first is gone
    "restarted process": lambda scene: _tier(scene, "restarted process", "host", "host", "disk"),
    "pool from another process": lambda scene: _tier(scene, "pool from another process", "p2p", "pool"),
}
