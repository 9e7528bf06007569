"""What the tests of the brain share: small caches in a world that checks them, and words for what happens there."""

from collections.abc import Callable
from typing import Any

from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, TierConfig
from headwater.core import events as ev
from machines.brain_world import ROOTS, Errand, World, WorldRequest
from machines.index_machine import path_keys

BLOCK_BYTES = 10
BLOCK_TOKENS = 4


def tier(name: str = "host", **options: Any) -> TierConfig:
    return TierConfig(name=name, **options)


def world(*tiers: TierConfig, num_slots: int = 8, **options: Any) -> World:
    """A world with a brain of so many slots. Prefetch is off unless asked for: it adds jobs."""
    options = {"policy": "lru", "prefetch": False, **options}
    sizes: dict[str, Any] = {"num_slots": num_slots, "block_tokens": BLOCK_TOKENS, "block_bytes": BLOCK_BYTES}
    return World(CacheConfig(**sizes, tiers=tiers, **options))


def tokens(path: str) -> tuple[int, ...]:
    """A sequence of blocks, each a digit."""
    return tuple(map(int, path))


def jobs(
    world: World, kind: type[ev.Job] = ev.Job, *, store: str | None = None, guest: WorldRequest | None = None
) -> list[Errand]:
    """Jobs under way, oldest first."""
    return [
        errand
        for errand in world.errands.values()
        if isinstance(errand.order, kind)
        and store in (None, errand.order.store)
        and (guest is None or errand.guest is guest)
    ]


def the(world: World, kind: type[ev.Job], **which: Any) -> Errand:
    """The only job of its kind."""
    (errand,) = jobs(world, kind, **which)
    return errand


def finish(world: World, kind: type[ev.Job] = ev.Job, **which: Any) -> None:
    """Jobs under way end well, and those that follow from them."""
    while errands := jobs(world, kind, **which):
        world.end(errands[0])
        world.check()


def ask(world: World, name: str, path: str, *, answered: bool = True, tenant: int = 0) -> WorldRequest:
    """A request asks, and has its answers."""
    guest = world.arrive(name, tokens(path), tenant=tenant)
    world.check()
    if answered:
        finish(world, ev.Probe, guest=guest)
    return guest


def run(world: World, name: str, path: str, *, more: int = 0, tenant: int = 0) -> WorldRequest:
    """A request asks, reserves, loads what is there, and commits the rest of its prompt. It stays."""
    guest = ask(world, name, path, tenant=tenant)
    assert world.want(guest, len(path) + more) is not None
    finish(world, ev.Load, guest=guest)
    world.fill(guest, len(path))
    world.check()
    return guest


def live(world: World, name: str, path: str, **options: Any) -> ev.Finished:
    """A whole life; everything that was begun for it ends well. Returns the bill."""
    world.leave(run(world, name, path, **options))
    finish(world)
    return world.bills[-1]


def fill_store(world: World, store: str, path: str, *, tenant: int = 0) -> None:
    """Another node stores a sequence."""
    keys = path_keys(tokens(path), ROOTS[tenant])
    world.register(keys, tenant)
    assert set(world.put(store, keys)) <= {"stored", "exists"}


def told(out: list[ev.Instruction], kind: str) -> list[dict[str, str]]:
    """What was told of one kind."""
    return [dict(one.facts) for one in out if isinstance(one, ev.Tell) and one.kind == kind]


def total(world: World, name: str, **labels: str) -> float:
    """A sum of the accounts, over all labels that are not given."""
    return sum(
        amount
        for (series, found), amount in world.brain.accounts.totals.items()
        if series == name and labels.items() <= dict(found).items()
    )


def statuses(world: World, guest: WorldRequest) -> list[str]:
    """What a request is told, block by block: a tier, "pending" or "miss"."""
    return [found or status.value for status, found in world.brain.view(guest.name)]


Step = Callable[[World], None]


# --- a brain that fails -----------------------------------------------------------------------------------------------


class Injected(Exception):
    """A fault of ours, as a test has it."""


def fail_at(brain: Brain, number: int, error: BaseException | None = None) -> None:
    """The n-th event that this brain hears from now on is one too many. Half of it may have been done by then."""
    handle, left = brain.handle, [number]

    def failing(event: ev.Event) -> list[ev.Instruction]:
        left[0] -= 1
        if left[0] >= 0:
            return handle(event)
        if left[0] == -1 and number % 2:
            handle(event)  # it raises at the end, when everything has changed
        raise error if error is not None else Injected("as the test wants it")

    brain.handle = failing  # type: ignore[method-assign]
