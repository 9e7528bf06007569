"""Stores that wrap stores: each adds one behaviour and passes the rest on.

Wrappers own nothing: closing one closes the store inside, as a caller expects of the thing it holds.
"""

from collections.abc import Sequence
from typing import Any, Final

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.storage.base import (
    Addressable,
    CachedNames,
    Damageable,
    Deadline,
    Listing,
    Piecewise,
    Registering,
    Store,
    StoreFill,
)

_CALLS: Final = frozenset({"put", "get_into", "contains", "delete"})
_WAYS: Final = frozenset({"addressable", "cached_names", "piecewise"})


class WrapperStore(Store):
    """Passes everything on, and with it all that the store inside can do besides.

    A subclass that changes a call must say what becomes of the ways past it, in place, in pieces and from memory: it
    overrides `addressable`, `piecewise` and `cached_names`, or is an OpaqueStore. One that does not is refused where it
    is defined.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse a class whose changes could be passed by."""
        super().__init_subclass__(**more)
        said = {name for one in cls.__mro__[: cls.__mro__.index(WrapperStore)] for name in vars(one)}
        if _CALLS & said and not said >= _WAYS:
            changed = ", ".join(sorted(_CALLS & said))
            raise TypeError(f"{cls.__name__} changes {changed}: what becomes of {' and '.join(sorted(_WAYS))}?")

    @property
    def cheap_calls(self) -> bool:
        """As of the store inside."""
        return self.store.cheap_calls

    @property
    def portion_bytes(self) -> int:
        """As of the store inside."""
        return self.store.portion_bytes

    @property
    def interruptible(self) -> bool:
        """As of the store inside."""
        return self.store.interruptible

    def addressable(self) -> Addressable | None:
        """As of the store inside."""
        return self.store.addressable()

    def piecewise(self) -> Piecewise | None:
        """As of the store inside."""
        return self.store.piecewise()

    def cached_names(self) -> CachedNames | None:
        """As of the store inside."""
        return self.store.cached_names()

    def registering(self) -> Registering | None:
        """As of the store inside."""
        return self.store.registering()

    def damageable(self) -> Damageable | None:
        """As of the store inside."""
        return self.store.damageable()

    def listing(self) -> Listing | None:
        """As of the store inside."""
        return self.store.listing()

    def fill(self) -> StoreFill | None:
        """As of the store inside."""
        return self.store.fill()

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Pass on."""
        return self.store.put(pages, deadline=deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Pass on."""
        return self.store.get_into(pages, deadline=deadline)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Pass on."""
        return self.store.contains(names, deadline=deadline)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Pass on."""
        return self.store.delete(names, deadline=deadline)

    def close(self) -> None:
        """Close the store inside."""
        self.store.close()


class OpaqueStore(WrapperStore):
    """A wrapper past which nothing goes: pages by `put` and `get_into` alone, and every question by `contains`."""

    def addressable(self) -> Addressable | None:
        """None: what is copied in place in the store inside does not come by here."""
        return None

    def piecewise(self) -> Piecewise | None:
        """None: pages come by here, whole."""
        return None

    def cached_names(self) -> CachedNames | None:
        """None: who looks asks here."""
        return None
