"""The cases of `verify --vllm`: how each is brought about in an engine, and what shows that it was.

Cases run in order: the first saves what others load. A case compares tokens with those of an engine without a
connector, and then looks at what vLLM counted: a hit from somewhere else, or a preemption that did not happen, is a
problem as much as another token.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from headwater.bench.vllm_client import Worker, WorkerFailed
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.verify.vllm_faults import Fault

ROOM_BYTES: Final = 64 << 20
_PROMPT_BLOCKS: Final = 8
_TAIL: Final = 5
_ANSWER: Final = 24
_BATCH: Final = 8
_CROWD, _CROWD_BLOCKS = 16, 4
_FILL, _FILL_AT_ONCE = 32, 8  # prompts that a small host tier does not hold
_SMALL_BYTES: Final = 8 << 20
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
    "gqa": Kind("gqa", "llama", 32, {**_SHAPE, "num_key_value_heads": 2}),
    "mla": Kind(
        "mla",
        "deepseek_v2",
        16,  # and a latent of 576 numbers: what vLLM's kernel for CPUs takes
        _MLA,
        # That kernel of vLLM 0.32 for CPUs gives other values for one token than for several, with or without a
        # connector: nothing could be compared. This is vLLM's own switch to its plain implementation.
        {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
    ),
}
_ON_GPU: Final[dict[str, object]] = {"gpu_memory_utilization": 0.1, "max_num_batched_tokens": 2048}
CUDA_KINDS: Final = {
    "gqa": Kind("gqa", "llama", 32, KINDS["gqa"].overrides, {**_ON_GPU, "attention_backend": "TRITON_ATTN"}),
    "gqa-bf16": Kind("gqa-bf16", "llama", 16, KINDS["gqa"].overrides, _ON_GPU, "bfloat16"),
    "mla": Kind(  # kernels for GPUs take these heads
        "mla",
        "deepseek_v2",
        64,
        {**_MLA, "num_attention_heads": 16, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128},
        _ON_GPU,
        "bfloat16",
    ),
}


def kinds_of(device: str) -> dict[str, Kind]:
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
    right: dict[str, list[list[list[int]]]]  # of each question, all answers that are right
    inject: bool = False
    host_bytes: int = ROOM_BYTES
    disk_bytes: int = ROOM_BYTES
    other: "Scene | None" = None  # the same model in another process, that has the same directories
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


def _many(scene: Scene) -> list[list[int]]:
    """A crowd: all of it fits the device at once."""
    return [scene.prompt(f"crowd {at}", num_blocks=_CROWD_BLOCKS) for at in range(_CROWD)]


def _answers(scene: Scene, prompts: list[list[int]]) -> list[list[list[int]]]:
    """What vLLM alone answers; where that depends on it, with each number of blocks in its own cache."""
    found = [scene.ask(*prompts)["tokens"]]
    scene.settle()
    if scene.kind.rounds:
        (prompt,) = prompts
        size = scene.kind.block_tokens
        for num_blocks in range(1, (len(prompt) - 1) // size + 1):
            scene.ask(prompt[: num_blocks * size + 1], max_tokens=1)
            said = scene.ask(prompt)
            if said["cached_tokens"] != [num_blocks * size]:
                raise HeadwaterError(f"vLLM's own cache gave {said['cached_tokens']} tokens, not {num_blocks * size}")
            found.append(said["tokens"])
            scene.settle()
    return found


def _cold(scene: Scene) -> Case:
    """Ask everything without a connector; then the first time with one."""
    scene.open()
    asked = {name: [scene.prompt(name)] for name in ("usual", "of two", "cut")} | {"half": [_half(scene)]}
    if not scene.kind.rounds:
        asked |= {"eight": _eight(scene), "crowd": _many(scene)}
    for name, prompts in asked.items():
        scene.right[name] = _answers(scene, prompts)
    if not scene.kind.rounds:
        scene.right["three"] = [scene.ask(*_three(scene), max_tokens=_long(scene))["tokens"]]
    if any(len(tokens) < _ANSWER for ways in scene.right.values() for answers in ways for tokens in answers):
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


def _crowd(scene: Scene) -> Case:
    """Many prompts at once, computed and saved; then again, when nothing of them is on the device."""
    scene.open("host")
    prompts = _many(scene)
    scene.ask(*prompts, max_tokens=1)
    scene.settle()
    said = scene.ask(*prompts)
    num_tokens = _CROWD_BLOCKS * scene.kind.block_tokens
    return scene.case("crowd", said, "crowd", cached=num_tokens, hits={"host": _CROWD * num_tokens})


def _apart(scene: Scene, name: str, **changes: Any) -> Scene:
    """The same scene with tiers of its own."""
    places = scene.places
    own = replace(places, host=places.host.with_name(f"{places.host.name}-{name}"), disk=places.disk / name)
    return replace(scene, places=own, **changes)


def _flipped(scene: Scene) -> Case:
    """A bit in every page of the slab changes while the engine has it open: none may be served."""
    scene = _apart(scene, "flipped")
    scene.open("host")
    scene.ask(scene.prompt("usual"))
    scene.settle()
    num_pages = scene.worker.ask("flip", timeout_s=_PATIENCE_S, directory=str(scene.places.host))["num_pages"]
    said = scene.ask(scene.prompt("usual"), give_up_s=DEADLINE_S)
    missed = sum(int(value) for key, value in said["counted"].items() if key.startswith(_MISSED) and "never" not in key)
    problem = ""
    if num_pages < _PROMPT_BLOCKS:
        problem = f"only {num_pages} pages were there to be damaged"
    elif said["counted"].get("external_prefix_cache_hits", 0) != _whole(scene):
        problem = f"vLLM was not promised the whole prompt once: {said['counted']}"
    elif missed < _whole(scene):
        problem = f"{_whole(scene) - missed} tokens of damaged pages were taken: {said['counted']}"
    return scene.case("flipped bits in the slab", said, "usual", problem=problem)


def _full(scene: Scene) -> Case:
    """More than the host tier holds: what it let go of comes from the disk."""
    scene = _apart(scene, "full", host_bytes=_SMALL_BYTES, disk_bytes=2 * ROOM_BYTES)
    scene.open("host", "disk")
    scene.ask(scene.prompt("usual"), max_tokens=1)
    scene.settle()
    fill = [scene.prompt(f"fill {at}") for at in range(_FILL)]
    for at in range(0, _FILL, _FILL_AT_ONCE):
        scene.ask(*fill[at : at + _FILL_AT_ONCE], max_tokens=1)
        scene.settle()
    said = scene.ask(scene.prompt("usual"))
    return scene.case("host full, disk behind it", said, "usual", cached=_whole(scene), hits={"disk": _whole(scene)})


def _two(scene: Scene) -> Case:
    """Two engines at once, in two processes: each loads what the other one saved."""
    name, other = "two engines, one slab", scene.other
    if other is None:
        return scene.skipped(name, "there is no other process")
    other.open("host")
    scene.open("host")
    mine = scene.ask(scene.prompt("usual"))
    found = scene.case(name, mine, "usual", cached=_whole(scene), hits={"host": _whole(scene)})
    if found.problem:
        return found
    scene.ask(scene.prompt("of two"), max_tokens=1)
    scene.settle()
    said = other.ask(other.prompt("of two"))
    return other.case(name, said, "of two", cached=_whole(scene), hits={"host": _whole(scene)})


def _killed(scene: Scene) -> Case:
    """The other process gets SIGKILL while it saves; a new engine finds what was saved, and nothing wrong."""
    name, other = "killed while it saves", scene.other
    if other is None:
        return scene.skipped(name, "there is no other process")
    other.ask(other.prompt("cut"), max_tokens=1)
    other.worker.kill()
    scene.open("host")
    cut = scene.case(name, scene.ask(scene.prompt("cut")), "cut")
    if cut.problem:
        return cut
    said = scene.ask(scene.prompt("usual"))
    return scene.case(name, said, "usual", cached=_whole(scene), hits={"host": _whole(scene)})


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
    "crowd": _crowd,
    "flipped bits in the slab": _flipped,
    "host full, disk behind it": _full,
    "control": _control,
}
BATCHES: Final = ("batch of 8", "chunked prefill", "preemption", "crowd")  # not compared where rounding depends on it
BOTH: Final[Cases] = {"two engines, one slab": _two}  # with both processes, then
KILLED: Final[Cases] = {"killed while it saves": _killed}  # the first is killed, while it has one engine open
LATER: Final[Cases] = {  # and in the second, when the first is gone
    "restarted process": lambda scene: _tier(scene, "restarted process", "host", "host", "disk"),
    "pool from another process": lambda scene: _tier(scene, "pool from another process", "p2p", "pool"),
}
