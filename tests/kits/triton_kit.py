"""Triton's kernels in tests: compiled where there is a GPU, interpreted elsewhere; `conftest.py` has chosen."""

from typing import Any

import pytest
import torch

from headwater.core.errors import InvalidCopy
from headwater.testing.copy import check_rows
from headwater.transfer.device import triton_copy
from headwater.transfer.device.copy_kernels import copy_planes
from headwater.transfer.device.triton_copy import PlaneTable
from headwater.transfer.device.xxh3 import interpreted

INTERPRETED = interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"  # where a cache must be for the kernels to reach it
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="torch sees no GPU, and TRITON_INTERPRET is not set"
)
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")


def _mend_interpreter() -> None:
    """NumPy 2.4 makes no scalar of an array with one element, which Triton 3.6's interpreter asks for in `range`."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


if INTERPRETED:
    _mend_interpreter()


# --- the kernel, launched by tensors, with everything checked: `Launcher` takes addresses and checks nothing ----------


def gather(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    planes: range,
    digests: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Copy planes of blocks into rows: block `slots[i]` into `rows[i]`, tightly packed, the first plane at column 0.

    `slots` are int64, [n], `rows` uint8, [n, width], both on the device. Bytes of a row behind the planes are not
    touched. `digests`, int64 [n, len(planes)], receives the XXH3-64 of each piece. At most `programs` programs run, as
    many as there is work for by default. Mutates `rows` and `digests`, in stream order. Raises InvalidCopy for what
    does not fit, before anything is launched.
    """
    _launch(table, slots, rows, planes, digests, programs, scatters=False)


def scatter(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    planes: range,
    digests: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Copy rows into planes of blocks: `gather` the other way. Mutates the cache's planes and `digests`."""
    _launch(table, slots, rows, planes, digests, programs, scatters=True)


def digest(
    table: PlaneTable,
    slots: torch.Tensor,
    digests: torch.Tensor,
    *,
    planes: range,
    programs: int | None = None,
) -> None:
    """Digest planes of blocks where they are. Mutates `digests` and nothing else; otherwise as `gather`."""
    rows = torch.empty(0, dtype=torch.uint8, device=slots.device).expand(len(slots), 0)
    _launch(table, slots, rows, planes, digests, programs, scatters=False, copies=False)


def _launch(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    planes: range,
    digests: torch.Tensor | None,
    programs: int | None,
    *,
    scatters: bool,
    copies: bool = True,
) -> None:
    start, num_bytes = table.span(planes)
    _check(table, slots, rows, planes, digests, num_bytes if copies else 0)
    if programs is not None and programs < 1:
        raise InvalidCopy(f"a copy needs at least one program, not {programs}")
    num_tasks = len(slots) * len(planes)
    if num_tasks == 0:
        return
    groups = -(-num_tasks // triton_copy._WARPS)
    alignment = table._alignment(planes, rows.data_ptr(), rows.stride(0) if len(rows) > 1 else 0)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        copy_planes[(min(groups, programs or groups),)](
            table._entries,
            table._words,
            slots,
            rows,
            slots if digests is None else digests,
            planes.start,
            start,
            len(slots),
            num_tasks,
            rows.stride(0),
            0 if digests is None else digests.stride(0),
            SCATTERS=scatters,
            COPIES=copies,
            DIGESTS=digests is not None,
            ALIGNMENT=alignment,
            WARPS=triton_copy._WARPS,
            BLOCKS=triton_copy._BLOCKS if alignment == 16 else 1,
            num_warps=triton_copy._WARPS,
        )


def _check(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    planes: range,
    digests: torch.Tensor | None,
    num_bytes: int,
) -> None:
    _ = table._cache.rows  # ResourceClosed
    check_rows(rows, 0, num_bytes)
    if rows.stride(1) != 1:
        raise InvalidCopy(f"rows must be contiguous bytes, not strides of {rows.stride()}")
    if slots.dtype != torch.int64 or slots.shape != (len(rows),) or not slots.is_contiguous():
        raise InvalidCopy(f"{len(rows)} rows need as many int64 slots, not {slots.dtype} of shape {tuple(slots.shape)}")
    tensors = [slots, rows]
    if digests is not None:
        shape = (len(rows), len(planes))
        if digests.dtype != torch.int64 or digests.shape != shape or digests.stride(1) != 1:
            raise InvalidCopy(f"digests must be int64 of shape {shape}, not {digests.dtype} of {tuple(digests.shape)}")
        tensors.append(digests)
    for tensor in tensors:
        if tensor.device != table.device:
            raise InvalidCopy(f"a tensor on {tensor.device} cannot go with planes on {table.device}")
