"""The cases of `verify --vllm`: how each is brought about in an engine, and what shows that it was.

Cases run in order: the first saves what others load. A case compares tokens with those of an engine without a
connector, and then looks at what vLLM counted: a hit from somewhere else, or a preemption that did not happen, is a
problem as much as another token.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from headwater.core.errors import HeadwaterError
from headwater.lab.verify.vllm_faults import VllmFault
from headwater.lab.verify.vllm_scene import ANSWER, PATIENCE_S, PROMPT_BLOCKS, ROOM_BYTES, VllmCase, VllmScene

_TAIL: Final = 5
_BATCH: Final = 8
_CROWD, _CROWD_BLOCKS = 16, 4
_FILL, _FILL_AT_ONCE = 32, 8  # prompts that a small host tier does not hold
_SMALL_BYTES: Final = 8 << 20
DEADLINE_S: Final = (
    60.0  # for a request whose load fails: its deadline, what vLLM makes of it, and computing on a busy machine
)
_CHUNK_BLOCKS: Final = 2
_LOADED: Final = 'headwater jobs_total{tier="host",job="load",outcome="done"}'
_MISSED: Final = "headwater miss_tokens_total"


def _whole(scene: VllmScene) -> int:
    return PROMPT_BLOCKS * scene.kind.block_tokens


def _prefixes(scene: VllmScene) -> list[list[int]]:
    return [scene.prompt(f"prefix {at}", num_blocks=4, tail=0) for at in range(2)]


def _eight(scene: VllmScene) -> list[list[int]]:
    """Prompts that share one of two prefixes; each has a tail of its own, of another length."""
    prefixes = _prefixes(scene)
    return [prefixes[at % 2] + scene.prompt(f"tail {at}", num_blocks=at % 3, tail=_TAIL + at) for at in range(_BATCH)]


def _three(scene: VllmScene) -> list[list[int]]:
    return [scene.prompt(f"long {at}", num_blocks=3) for at in range(3)]


def _half(scene: VllmScene) -> list[int]:
    """A prompt of which the first half is that of the usual one."""
    return scene.prompt("usual")[: _whole(scene) // 2] + scene.prompt("other half")


def _many(scene: VllmScene) -> list[list[int]]:
    """A crowd: all of it fits the device at once."""
    return [scene.prompt(f"crowd {at}", num_blocks=_CROWD_BLOCKS) for at in range(_CROWD)]


def _answers(scene: VllmScene, prompts: list[list[int]]) -> list[list[list[int]]]:
    """What vLLM alone answers; where that depends on it, with each number of blocks in its own cache."""
    found = [scene.ask(*prompts)["tokens"]]
    scene.settle()
    if scene.kind.rounds:
        (prompt,) = prompts
        size = scene.kind.block_tokens
        for num_blocks in range(1, (len(prompt) - 1) // size + 1):
            scene.ask(prompt[: num_blocks * size + 1], max_tokens=1)
            found.append(scene.ask(prompt)["tokens"])
            scene.settle()
    return found


def _cold(scene: VllmScene) -> VllmCase:
    """Ask everything without a connector; then the first time with one."""
    scene.open()
    asked = {name: [scene.prompt(name)] for name in ("usual", "of two", "cut")} | {"half": [_half(scene)]}
    if not scene.kind.rounds:
        asked |= {"eight": _eight(scene), "crowd": _many(scene)}
    for name, prompts in asked.items():
        scene.right[name] = _answers(scene, prompts)
    if not scene.kind.rounds:
        scene.right["three"] = [scene.ask(*_three(scene), max_tokens=_long(scene))["tokens"]]
    if any(len(tokens) < ANSWER for ways in scene.right.values() for answers in ways for tokens in answers):
        raise HeadwaterError("vLLM without a connector did not answer")
    scene.open("host", "disk", "pool")
    return scene.case("cold", scene.ask(*asked["usual"]), "usual", cached=0, hits={})


def _local(scene: VllmScene) -> VllmCase:
    if not scene.facts["prefix_caching"]:
        return scene.skipped("local hit", "vLLM switches its own prefix cache off for this model")
    said = scene.ask(scene.prompt("usual"))
    return scene.case("local hit", said, "usual", cached=_whole(scene), hits={"device": _whole(scene)})


def _host(scene: VllmScene) -> VllmCase:
    scene.settle()
    said = scene.ask(scene.prompt("usual"))
    return scene.case("host", said, "usual", cached=_whole(scene), hits={"host": _whole(scene)})


def _batch(scene: VllmScene) -> VllmCase:
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


def _tier(scene: VllmScene, name: str, source: str, *tiers: str, load: str = "async") -> VllmCase:
    """The usual prompt from the first of some tiers, in a new engine."""
    scene.open(*tiers, load=load)
    said = scene.ask(scene.prompt("usual"))
    return scene.case(name, said, "usual", cached=_whole(scene), hits={source: _whole(scene)})


def _failing(scene: VllmScene, name: str, fault: VllmFault, load: str, num_good: int = PROMPT_BLOCKS // 2) -> VllmCase:
    """The first blocks arrive, the rest does not; it has to end by its deadline, and right.

    Where not even the first arrives vLLM asks again what is there: a connector that still promised it would never end.
    """
    scene.open("host", fault=fault, load=load, num_good=num_good)
    said = scene.ask(scene.prompt("usual"), give_up_s=DEADLINE_S)
    counted = said["counted"]
    least = (PROMPT_BLOCKS - num_good) * scene.kind.block_tokens
    missed = sum(int(value) for key, value in counted.items() if key.startswith(_MISSED) and "never" not in key)
    problem = ""
    if counted.get("external_prefix_cache_hits", 0) != _whole(scene):
        problem = f"vLLM was not promised the whole prompt once: {counted}"
    elif missed < least or (missed > least and fault is not VllmFault.HANG):
        problem = f"{missed} tokens failed to load, not {least}: {counted}"
    return scene.case(f"{name}, {load}", said, "usual", problem=problem)


def _chunked(scene: VllmScene) -> VllmCase:
    """Half of a long prompt is loaded, the rest is computed in several steps."""
    name = "chunked prefill"
    scene.open("host", options={"max_num_batched_tokens": _CHUNK_BLOCKS * scene.kind.block_tokens})
    if not scene.facts["chunked_prefill"]:
        return scene.skipped(name, "vLLM does not compute this model's prompts in parts")
    said = scene.ask(_half(scene))
    least = (PROMPT_BLOCKS + PROMPT_BLOCKS // 2) // _CHUNK_BLOCKS - PROMPT_BLOCKS // 2 // _CHUNK_BLOCKS
    problem = f"it took {said['steps_to_first']} steps" if said["steps_to_first"] < least else ""
    half = _whole(scene) // 2
    return scene.case(name, said, "half", cached=half, hits={"host": half}, problem=problem)


def _long(scene: VllmScene) -> int:
    return 3 * scene.kind.block_tokens


def _preempted(scene: VllmScene) -> VllmCase:
    """Three requests whose answers do not all fit."""
    size = scene.kind.block_tokens
    scene.open("host", options={"num_gpu_blocks_override": 14, "max_model_len": 12 * size, "max_num_seqs": 4})
    said = scene.ask(*_three(scene), max_tokens=_long(scene))
    counted = said["counted"]
    problem = "" if counted.get("num_preemptions", 0) else "nothing was preempted"
    if not problem and not counted.get(_LOADED, 0):
        problem = f"what was preempted was not loaded again: {counted}"
    return scene.case("preemption", said, "three", problem=problem)


def _control(scene: VllmScene) -> VllmCase:
    """A hit whose bytes are damaged behind all checks."""
    scene.open("host", spoil=True)
    said = scene.ask(scene.prompt("usual"))
    return scene.case("control", said, "usual", differ=True, cached=_whole(scene), hits={"host": _whole(scene)})


def _crowd(scene: VllmScene) -> VllmCase:
    """Many prompts at once, computed and saved; then again, when nothing of them is on the device."""
    scene.open("host")
    prompts = _many(scene)
    scene.ask(*prompts, max_tokens=1)
    scene.settle()
    said = scene.ask(*prompts)
    num_tokens = _CROWD_BLOCKS * scene.kind.block_tokens
    return scene.case("crowd", said, "crowd", cached=num_tokens, hits={"host": _CROWD * num_tokens})


def _apart(scene: VllmScene, name: str, **changes: Any) -> VllmScene:
    """The same scene with tiers of its own."""
    places = scene.places
    own = replace(places, host=places.host.with_name(f"{places.host.name}-{name}"), disk=places.disk / name)
    return replace(scene, places=own, **changes)


def _flipped(scene: VllmScene) -> VllmCase:
    """A bit in every page of the slab changes while the engine has it open: none may be served."""
    scene = _apart(scene, "flipped")
    scene.open("host")
    scene.ask(scene.prompt("usual"))
    scene.settle()
    num_pages = scene.worker.ask("flip", timeout_s=PATIENCE_S, directory=str(scene.places.host))["num_pages"]
    said = scene.ask(scene.prompt("usual"), give_up_s=DEADLINE_S)
    missed = sum(int(value) for key, value in said["counted"].items() if key.startswith(_MISSED) and "never" not in key)
    problem = ""
    if num_pages < PROMPT_BLOCKS:
        problem = f"only {num_pages} pages were there to be damaged"
    elif said["counted"].get("external_prefix_cache_hits", 0) != _whole(scene):
        problem = f"vLLM was not promised the whole prompt once: {said['counted']}"
    elif missed < _whole(scene):
        problem = f"{_whole(scene) - missed} tokens of damaged pages were taken: {said['counted']}"
    return scene.case("flipped bits in the slab", said, "usual", problem=problem)


def _full(scene: VllmScene) -> VllmCase:
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


def _two(scene: VllmScene) -> VllmCase:
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


def _killed(scene: VllmScene) -> VllmCase:
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


Cases = Mapping[str, Callable[[VllmScene], VllmCase]]

FIRST: Final[Cases] = {  # what runs in the first process, in order
    "cold": _cold,
    "local hit": _local,
    "host": _host,
    "batch of 8": _batch,
    "disk": lambda scene: _tier(scene, "disk", "disk", "disk"),
    "load fails half-way, sync": lambda scene: _failing(scene, "load fails half-way", VllmFault.FAIL, "sync"),
    "load fails half-way, async": lambda scene: _failing(scene, "load fails half-way", VllmFault.FAIL, "async"),
    "load fails at once, sync": lambda scene: _failing(scene, "load fails at once", VllmFault.FAIL, "sync", 0),
    "load fails at once, async": lambda scene: _failing(scene, "load fails at once", VllmFault.FAIL, "async", 0),
    "load hangs half-way, sync": lambda scene: _failing(scene, "load hangs half-way", VllmFault.HANG, "sync"),
    "load hangs half-way, async": lambda scene: _failing(scene, "load hangs half-way", VllmFault.HANG, "async"),
    "damaged pages, async": lambda scene: _failing(scene, "damaged pages", VllmFault.DAMAGE, "async"),
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
