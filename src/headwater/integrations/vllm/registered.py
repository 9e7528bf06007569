"""The KV tensors that vLLM registered, as a device cache: rows of bytes, one per block, whatever is inside them.

A block is copied whole, byte for byte. Nothing is believed about what is in it: on CPUs the shape that vLLM shows is
only nominal, on GPUs backends differ. What is read off the tensors is where a block's bytes lie:

- the dimension that counts blocks; those before it (keys and values apart) make several planes of one tensor;
- behind it, a dense chunk of bytes per block; vLLM's kernels may use smaller blocks, several of which make one;
- or chunks of several layers side by side in one allocation, block by block: these are one plane, gaps included.

On a GPU a digest is one warp's work, byte after byte: a plane that is long is cut into several, or a block of one plane
would keep the device busy for longer than its bytes take over the bus.

Anything else is refused. Because blocks are copied whole, a cache that was written with one tensor-parallel size is of
no use to another: the identity tells them apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch

from headwater.core.errors import InvalidLayout
from headwater.layout.spec import opaque_layout
from headwater.transfer.device.arena import DeviceCache

Facts: TypeAlias = dict[str, object]

_GPU_PLANE_BYTES: Final = 32 << 10
_MOST_PLANES: Final = 256  # that one is cut into
_PLANE_ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class _Rows:
    """Bytes of all blocks in one allocation: `num_bytes` each, `stride` apart, from `offset` on."""

    storage: torch.UntypedStorage
    offset: int
    stride: int
    num_bytes: int

    @property
    def place(self) -> tuple[int, int]:
        return self.storage.data_ptr(), self.stride


class RowsCache(DeviceCache):
    """Tensors of which nothing is owned: closing it only lets go of them."""

    layerwise = False  # vLLM hears of a block when all of it is there

    def _show(self, planes: Sequence[_Rows], block_tokens: int) -> None:
        self._rows = [_view(rows, self.num_blocks, self.device) for rows in planes]
        self.layout = opaque_layout([row.shape[1] for row in self._rows], block_tokens)
        self._flat = self._rows
        names = [(plane.role.name, plane.layer) for plane in self.layout.planes]
        self._tensors = MappingProxyType(dict(zip(names, self._flat, strict=True)))
        self._closed = False


class RegisteredCache(RowsCache):
    """vLLM's tensors."""

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        num_blocks: int,
        block_tokens: int,
        plane_bytes: int | None = None,
    ) -> None:
        """Raises InvalidLayout for tensors in which a block is not a run of bytes.

        `plane_bytes`: planes have so many at most, or a few times as many where there would be very many; by default as
        the device wants it.
        """
        if not kv_caches:
            raise InvalidLayout("vLLM registered no KV tensors")
        found: list[_Rows] = []
        self.facts: list[Facts] = []
        for name, tensor in kv_caches.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidLayout(f"{name}: vLLM registered {type(tensor).__name__}, not one tensor")
            rows, facts = _rows_of(name, tensor, num_blocks)
            found += rows
            self.facts.append(facts)
        devices = {tensor.device for tensor in kv_caches.values()}
        if len(devices) > 1:
            raise InvalidLayout(f"the KV tensors are on several devices: {sorted(map(str, devices))}")
        self.device = devices.pop()
        self.num_blocks = num_blocks
        most = plane_bytes or (_GPU_PLANE_BYTES if self.device.type == "cuda" else None)
        self.planes = [part for rows in _merged(found, num_blocks) for part in _cut(rows, most)]
        self._show(self.planes, block_tokens)


class MappedCache(RowsCache):
    """The same in another process, from what `say_planes` said there."""

    takes_turns = True

    def __init__(self, said: Mapping[str, Any]) -> None:
        """Raises InvalidLayout if the memory cannot be mapped here."""
        try:
            storages = [_mapped(place) for place in said["storages"]]
        except (RuntimeError, OSError) as error:
            raise InvalidLayout(f"vLLM's KV cannot be mapped into this process: {error}") from error
        self.device = storages[0].device
        self.num_blocks = int(said["num_blocks"])
        self._show([_Rows(storages[at], *numbers) for at, *numbers in said["planes"]], int(said["block_tokens"]))


def say_planes(cache: RegisteredCache) -> dict[str, Any]:
    """Where another process finds these tensors, as plain values. Raises InvalidLayout if it cannot map them.

    They must live for as long as it has them.
    """
    storages = {rows.storage.data_ptr(): rows.storage for rows in cache.planes}
    numbers = {address: at for at, address in enumerate(storages)}
    try:
        places = [_placed(storage) for storage in storages.values()]
    except (RuntimeError, OSError) as error:
        raise InvalidLayout(f"vLLM's KV cannot be shared with another process: {error}") from error
    return {
        "storages": places,
        "planes": [(numbers[one.storage.data_ptr()], one.offset, one.stride, one.num_bytes) for one in cache.planes],
        "num_blocks": cache.num_blocks,
        "block_tokens": cache.layout.block_tokens,
    }


def _placed(storage: torch.UntypedStorage) -> dict[str, Any]:
    if storage.device.type == "cuda":
        handle = storage._share_cuda_()  # type: ignore[no-untyped-call]
        return {"cuda": [part.hex() if isinstance(part, bytes) else part for part in handle]}
    if storage.filename is None:
        raise RuntimeError("it is this process' own memory")
    return {"file": storage.filename, "num_bytes": storage.nbytes()}


def _mapped(place: Mapping[str, Any]) -> torch.UntypedStorage:
    if "cuda" in place:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(place["cuda"][0])  # or another one has a context of ours, too
        handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in place["cuda"]]
        return torch.UntypedStorage._new_shared_cuda(*handle)
    found: torch.UntypedStorage = torch.UntypedStorage.from_file(  # type: ignore[assignment]  # its base class' word
        place["file"], shared=True, nbytes=place["num_bytes"]
    )
    return found


def _rows_of(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[list[_Rows], Facts]:
    """Where a layer's blocks lie, and what is to be remembered of its tensor."""
    axis = next((at for at in range(min(2, tensor.dim())) if _counts_blocks(tensor, at, num_blocks)), None)
    if axis is None:
        raise InvalidLayout(f"{name}: a tensor of shape {tuple(tensor.shape)} has no dimension of {num_blocks} blocks")
    per_block = tensor.shape[axis] // num_blocks
    inner = tensor.shape[axis + 1 :]
    item = tensor.element_size()
    chunk = item
    for size, stride in sorted(zip(inner, tensor.stride()[axis + 1 :], strict=True), key=lambda one: one[1]):
        if size > 1 and stride * item != chunk:
            raise InvalidLayout(
                f"{name}: a block of shape {tuple(inner)} and strides {tensor.stride()[axis + 1 :]} is no run of bytes"
            )
        chunk *= size
    stride = tensor.stride(axis) * item
    if per_block > 1 and stride != chunk:
        raise InvalidLayout(f"{name}: {per_block} kernel blocks make one block, and do not lie side by side")
    outer = tensor.unbind(0) if axis == 1 else (tensor,)
    rows = [
        _Rows(part.untyped_storage(), int(part.storage_offset()) * item, stride * per_block, chunk * per_block)
        for part in outer
    ]
    facts: Facts = {
        "name": name,
        "dtype": str(tensor.dtype),
        "parts": len(outer),
        "kernel_blocks": per_block,
        "shape": list(inner),
        # A dimension of one has no stride that would mean anything.
        "strides": [step if size > 1 else 0 for size, step in zip(inner, tensor.stride()[axis + 1 :], strict=True)],
        "block_stride": stride,
    }
    return rows, facts


def _counts_blocks(tensor: torch.Tensor, at: int, num_blocks: int) -> bool:
    if at == 1 and tensor.shape[0] > 2:  # only keys and values may come before
        return False
    return tensor.shape[at] >= num_blocks and tensor.shape[at] % num_blocks == 0


def _cut(rows: _Rows, most: int | None) -> list[_Rows]:
    """Planes of at most so many bytes of a block each, out of one."""
    if most is None or rows.num_bytes <= most:
        return [rows]
    least = -(-rows.num_bytes // _MOST_PLANES)
    size = most if least <= most else -(-least // _PLANE_ALIGNMENT) * _PLANE_ALIGNMENT
    starts = range(0, rows.num_bytes, size)
    return [_Rows(rows.storage, rows.offset + at, rows.stride, min(size, rows.num_bytes - at)) for at in starts]


def _merged(found: Sequence[_Rows], num_blocks: int) -> list[_Rows]:
    """Rows that are planes: each once; those that lie side by side in one allocation as one."""
    planes: list[_Rows] = []
    seen: set[tuple[int, int, int]] = set()
    beside: dict[tuple[int, int], list[_Rows]] = {}
    for rows in found:
        if (*rows.place, rows.offset) in seen:
            continue  # layers that share their KV
        seen.add((*rows.place, rows.offset))
        if rows.stride == rows.num_bytes:
            planes.append(rows)
        elif rows.place in beside:
            beside[rows.place].append(rows)
        else:
            beside[rows.place] = [rows]
    for (_, stride), group in beside.items():
        planes += _side_by_side(sorted(group, key=lambda rows: rows.offset), stride, num_blocks)
    return planes


def _side_by_side(group: Sequence[_Rows], stride: int, num_blocks: int) -> list[_Rows]:
    """Chunks of one allocation, by offset, that leave room between their blocks: for each other, or for padding.

    Those within one stride are one plane. A layer that lies behind all blocks of another is a plane of its own.
    """
    runs: list[list[_Rows]] = []
    for rows in group:
        if runs and rows.offset + rows.num_bytes - runs[-1][0].offset <= stride:
            runs[-1].append(rows)
        elif not runs or rows.offset >= runs[-1][0].offset + num_blocks * stride:
            runs.append([rows])
        else:
            raise InvalidLayout("layers lie side by side in one allocation, and overlap")
    planes: list[_Rows] = []
    for run in runs:
        storage, offset = run[0].storage, run[0].offset
        end = max(rows.offset + rows.num_bytes for rows in run)
        if offset + num_blocks * stride > storage.nbytes() and len(runs) == 1:
            offset = max(0, storage.nbytes() - num_blocks * stride)
        if offset + num_blocks * stride > storage.nbytes() or end - offset > stride:
            raise InvalidLayout(
                f"a block has {end - run[0].offset} bytes, {stride} from one to the next, and behind the last one the "
                "allocation ends: blocks are copied with what lies between them"
            )
        planes.append(_Rows(storage, offset, stride, stride))
    return planes


def _view(rows: _Rows, num_blocks: int, device: torch.device) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=device)
    return flat.set_(rows.storage, rows.offset, (num_blocks, rows.num_bytes), (rows.stride, 1))
