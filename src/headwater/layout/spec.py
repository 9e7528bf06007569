"""A layout is data: which planes one block has, in which order, of how many bytes.

A *plane* is one role (key, value, a scale ...) of one layer. A *page* holds the planes of one block back to back, in
flat order and without gaps: sizes come from the planes alone. Flat order is (layer, role priority), whatever order the
planes were given in, because engines find their tensors by position.

    fingerprint = SHA-256( "headwater/layout/1" ‖ u32 block_tokens ‖ u32 num_planes
                         ‖ for each plane in flat order:
                             u32 len(role) ‖ role ‖ u32 layer ‖ u32 len(dtype) ‖ dtype
                             ‖ i32 split (-1: replicated) ‖ i32 token axis (-1: none)
                             ‖ u32 num_dims ‖ num_dims x u32 dim )

Integers are little-endian, text is ASCII. A role's priority shows only through the order of the planes, as it does in
the bytes.

Not here: what an attention family needs (`gqa.py`, `mla.py`, `dsa.py`), ranks (`shard.py`), tensors (`transfer/`).
"""

import hashlib
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Final, NoReturn

from headwater.core.errors import InvalidLayout

_LIMIT: Final = 1 << 31  # every number in a layout fits an i32
_ROLE_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


def _check_int(what: str, value: object, low: int, end: int = _LIMIT) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < end:
        raise InvalidLayout(f"{what} must be an int in [{low}, {end}), not {value!r}")


class DType(Enum):
    """Element types a plane may have. `DType("bf16")` finds one by name; an unknown name is InvalidLayout."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise InvalidLayout(f"unknown dtype {value!r}; known are {', '.join(dtype.value for dtype in cls)}")


_ITEMSIZE: Final = {DType.FP32: 4, DType.BF16: 2, DType.FP16: 2} | dict.fromkeys(
    (DType.FP8_E4M3, DType.FP8_E5M2, DType.INT8, DType.UINT8), 1
)


@dataclass(frozen=True, slots=True)
class PlaneRole:
    """What a plane holds. `priority` is its place among the planes of one layer."""

    name: str
    priority: int


_roles: dict[str, PlaneRole] = {}  # process wide: a role means the same everywhere, or positions mean nothing


def declare_role(name: str, priority: int) -> PlaneRole:
    """Add a role, or find the equal one; a name or priority that is taken otherwise is InvalidLayout."""
    if not _ROLE_NAME.fullmatch(name):
        raise InvalidLayout(f"a role's name is lower-case letters, digits and underscores, not {name!r}")
    _check_int("a role's priority", priority, 0)
    declared = PlaneRole(name, priority)
    for known in _roles.values():
        if known != declared and (known.name == name or known.priority == priority):
            raise InvalidLayout(f"role {name!r} with priority {priority} clashes with {known}")
    return _roles.setdefault(name, declared)


def role(name: str) -> PlaneRole:
    """Find a declared role; an unknown name is InvalidLayout, never a new role."""
    if name not in _roles:
        raise InvalidLayout(f"unknown role {name!r}; known are {', '.join(sorted(_roles))}")
    return _roles[name]


# Gaps leave room for a role that must stand between two of these.
KEY: Final = declare_role("key", 0)
VALUE: Final = declare_role("value", 10)
KEY_SCALE: Final = declare_role("key_scale", 20)
VALUE_SCALE: Final = declare_role("value_scale", 30)
LATENT: Final = declare_role("latent", 40)
INDEXER: Final = declare_role("indexer", 50)


@dataclass(frozen=True, slots=True)
class Plane:
    """One role of one layer, for ONE block; the engine's tensor has the number of blocks in front of `shape`.

    `split` is the axis of `shape` that is divided over tensor-parallel ranks; None: every rank holds the whole plane.
    `token_axis` is the axis that counts the block's tokens; None: the plane cannot be cut between tokens, so its blocks
    are stored whole or not at all.
    """

    role: PlaneRole
    layer: int
    shape: tuple[int, ...]
    dtype: DType
    split: int | None = None
    token_axis: int | None = None

    def __post_init__(self) -> None:
        """Refuse a plane that has no bytes or no place."""
        if _roles.get(self.role.name) != self.role:
            raise InvalidLayout(f"{self.role} was not declared; see declare_role()")
        _check_int("a plane's layer", self.layer, 0)
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", DType(self.dtype))  # a name will do; an unknown one will not
        if not self.shape:
            raise InvalidLayout(f"plane {self.name} has an empty shape")
        for dim in self.shape:
            _check_int(f"each dimension of plane {self.name}", dim, 1)
        if self.split is not None:
            _check_int(f"the split axis of plane {self.name}", self.split, 0, len(self.shape))
        if self.token_axis is not None:
            _check_int(f"the token axis of plane {self.name}", self.token_axis, 0, len(self.shape))
            if self.token_axis == self.split:
                raise InvalidLayout(f"plane {self.name} cannot divide its tokens over ranks")

    @property
    def name(self) -> str:
        """Stable name, such as `key.3`."""
        return f"{self.role.name}.{self.layer}"

    @property
    def num_bytes(self) -> int:
        """Bytes per block."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class KVLayout:
    """The planes of one block, always in flat order. Equal layouts have equal fingerprints and equal pages."""

    block_tokens: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        """Sort the planes; refuse none at all and two with one name."""
        _check_int("block_tokens", self.block_tokens, 1)
        planes = tuple(sorted(self.planes, key=lambda plane: (plane.layer, plane.role.priority)))
        object.__setattr__(self, "planes", planes)
        if not planes:
            raise InvalidLayout("a layout has at least one plane")
        for plane in planes:
            if plane.token_axis is not None and plane.shape[plane.token_axis] != self.block_tokens:
                raise InvalidLayout(f"plane {plane.name} has not {self.block_tokens} tokens on its token axis")
        if len(self._index) != len(planes):
            twice = next(a.name for a, b in pairwise(planes) if a.name == b.name)
            raise InvalidLayout(f"plane {twice} is there twice")

    @cached_property
    def _index(self) -> dict[tuple[str, int], int]:
        return {(plane.role.name, plane.layer): index for index, plane in enumerate(self.planes)}

    @cached_property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes per block of each plane, in flat order."""
        return tuple(plane.num_bytes for plane in self.planes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane in a page, in flat order."""
        return tuple(accumulate(self.plane_bytes[:-1], initial=0))

    @property
    def page_bytes(self) -> int:
        """Bytes of one block, planes tightly packed."""
        return sum(self.plane_bytes)

    @cached_property
    def num_layers(self) -> int:
        """How many layers have a plane."""
        return len({plane.layer for plane in self.planes})

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes over everything that decides what the bytes mean; the encoding is in the module's docstring."""
        head = b"headwater/layout/1" + struct.pack("<II", self.block_tokens, len(self.planes))
        return hashlib.sha256(head + b"".join(map(_encode, self.planes))).digest()

    def index(self, role_name: str, layer: int) -> int:
        """Position of a plane in flat order; InvalidLayout where there is none."""
        found = self._index.get((role_name, layer))
        if found is None:
            raise InvalidLayout(f"this layout has no plane {role_name}.{layer}")
        return found

    def plane(self, role_name: str, layer: int) -> Plane:
        """Find a plane; InvalidLayout where there is none."""
        return self.planes[self.index(role_name, layer)]

    def with_layer_offset(self, num_layers: int) -> "KVLayout":
        """Return the same planes `num_layers` further up, where draft layers live behind the main model's."""
        return KVLayout(
            self.block_tokens, tuple(replace(plane, layer=plane.layer + num_layers) for plane in self.planes)
        )


def combine(*layouts: KVLayout) -> KVLayout:
    """Join the layouts of one model's layer groups; InvalidLayout if blocks differ or a (role, layer) is in two."""
    sizes = {layout.block_tokens for layout in layouts}
    if len(sizes) > 1:
        raise InvalidLayout(f"layouts with different block_tokens cannot share a page: {sorted(sizes)}")
    if not sizes:
        raise InvalidLayout("combine() needs at least one layout")
    return KVLayout(sizes.pop(), tuple(chain.from_iterable(layout.planes for layout in layouts)))


def opaque_layout(plane_bytes: Sequence[int], block_tokens: int) -> KVLayout:
    """Planes of which nothing is known but their sizes: bytes that are moved whole."""
    planes = (Plane(KEY, layer, (num_bytes,), DType.UINT8) for layer, num_bytes in enumerate(plane_bytes))
    return KVLayout(block_tokens, tuple(planes))


def _encode(plane: Plane) -> bytes:
    axes = (-1 if axis is None else axis for axis in (plane.split, plane.token_axis))
    shape = struct.pack(f"<iiI{len(plane.shape)}I", *axes, len(plane.shape), *plane.shape)
    return _text(plane.role.name) + struct.pack("<I", plane.layer) + _text(plane.dtype.value) + shape


def _text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode("ascii")
