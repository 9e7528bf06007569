"""Every error Headwater raises, in one tree.

    HeadwaterError
    ├── InvalidInput (ValueError)       the caller passed something that can never work
    │   ├── InvalidTokens                 token ids out of u32, wrong shape or type
    │   ├── InvalidLayout                 a layout that contradicts itself; an unknown role or dtype
    │   ├── InvalidCopy                   ids out of range, lengths that differ, overlapping destinations
    │   └── InvalidConfig                 an option or environment variable that makes no sense
    ├── HostTierUnavailable             host memory cannot be had: the host tier is disabled, the rest goes on
    ├── CopyDamaged                     bytes were not the same after a copy: nothing of it may be used
    ├── CopyStuck                       a copy does not end, and what it writes to cannot be given up
    ├── ResourceClosed                  used after close()
    ├── NotInstalled                    an optional package is missing; the message says what to install
    ├── RankUnavailable                 a rank's process did not come, or is not the rank it should be
    ├── Contradiction (AssertionError)  our own books do not agree: a fault of ours, and nothing in them may be believed
    └── StoreError                      a store cannot be opened or used; the cache goes on without the tier
        ├── StoreUnavailable              missing, read-only or foreign directory, another version, full disk
        ├── StoreMismatch                 the directory was made with other settings (byte limit, policy)
        ├── StoreBusy                     another process is opening or rebuilding it, and the deadline passed
        ├── StoreDamaged                  index or slab were damaged under a running process: reopen to rebuild
        └── StoreForked                   opened before fork(): open it again in the child

What happens to one key in a batch (missing, corrupt, too late, no room) is never an exception: it is that key's result.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class HeadwaterError(Exception):
    """Root of the tree."""


class InvalidInput(HeadwaterError, ValueError):
    """The caller passed something that can never work."""


class InvalidTokens(InvalidInput):
    """Token ids out of u32, of the wrong shape or type."""


class InvalidLayout(InvalidInput):
    """A layout that contradicts itself, or an unknown role or dtype."""


class InvalidCopy(InvalidInput):
    """Ids out of range, lengths that differ, overlapping destinations."""


class InvalidConfig(InvalidInput):
    """An option or environment variable that makes no sense."""


class HostTierUnavailable(HeadwaterError):
    """Host memory cannot be had: disable the host tier and go on."""


class CopyDamaged(HeadwaterError):
    """Bytes were not the same after a copy: nothing of it may be used."""


class CopyStuck(HeadwaterError):
    """A copy does not end, and what it writes to cannot be given up."""


class ResourceClosed(HeadwaterError):
    """Used after close()."""


class NotInstalled(HeadwaterError):
    """An optional package is missing; the message says what to install."""


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Around imports of packages that an extra brings: one that is missing raises NotInstalled."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotInstalled(f"this needs {error.name}: pip install 'headwater[{name}]'") from error


class RankUnavailable(HeadwaterError):
    """A rank's process did not come, or is not the rank it should be: the group cannot be made."""


class Contradiction(HeadwaterError, AssertionError):
    """Our own books do not agree: the cache fails closed. Raised, and not asserted: `python -O` removes asserts."""


class StoreError(HeadwaterError):
    """A store cannot be opened or used; the cache goes on without the tier."""


class StoreUnavailable(StoreError):
    """Missing, read-only or foreign directory, wrong owner, another version, full disk."""


class StoreMismatch(StoreError):
    """The directory was made with other settings than those asked for."""


class StoreBusy(StoreError):
    """Another process is opening or rebuilding the directory, and the deadline passed."""


class StoreDamaged(StoreError):
    """Index or slab were damaged under a running process: reopen to rebuild."""


class StoreForked(StoreError):
    """Opened before fork(): open it again in the child."""
