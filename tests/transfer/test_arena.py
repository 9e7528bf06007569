"""Arenas: shapes, alignment, ownership; the mapping really goes away, and never under somebody's feet."""

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.build import open_host_pages
from headwater.core.errors import HostTierUnavailable, InvalidInput, ResourceClosed
from headwater.layout.gqa import gqa_layout
from headwater.layout.spec import KEY, DType, KVLayout, Plane
from headwater.metrics import Metrics
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.device.cuda import pin

LAYOUT = sample_layouts()["gqa-fp8-scales"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def mapped(address: int) -> bool:
    """Whether the kernel has this address mapped in our process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def mapped_bytes() -> int:
    """Bytes of all shared anonymous mappings, which is what host caches are made of."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("/dev/zero (deleted)"):
            start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            total += end - start
    return total


@pytest.mark.parametrize("device", DEVICES)
def test_device_cache_has_zeroed_planes_by_name_and_by_position(device: str) -> None:
    with create_kv_cache(LAYOUT, 5, device) as cache:
        assert list(cache.tensors) == [(plane.role.name, plane.layer) for plane in LAYOUT.planes]
        for plane, tensor, row in zip(LAYOUT.planes, cache.flat, cache.rows, strict=True):
            assert tensor is cache.tensors[plane.role.name, plane.layer]
            assert tensor.shape == (5, *plane.shape)
            assert tensor.device.type == device
            assert tensor.data_ptr() == row.data_ptr()
            assert row.shape == (5, plane.num_bytes)
            assert not row.any()


@pytest.mark.parametrize("dtype", DType)
def test_every_dtype_has_a_tensor_of_its_width(dtype: DType) -> None:
    with create_kv_cache(KVLayout(4, (Plane(KEY, 0, (4, 3), dtype),)), 2) as cache:
        assert cache.flat[0].element_size() == dtype.itemsize
        assert dtype.value.split("_")[0].replace("fp", "float").replace("bf", "bfloat") in str(cache.flat[0].dtype)


def test_closed_device_cache() -> None:
    cache = create_kv_cache(LAYOUT, 2)
    held = cache.flat[0]
    cache.close()
    cache.close()
    for use in (lambda: cache.flat, lambda: cache.tensors, lambda: cache.rows):
        with pytest.raises(ResourceClosed):
            use()
    held.view(torch.uint8).fill_(7)
    assert held.view(torch.uint8).sum() == 7 * held.nbytes


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, None])
def test_counts_must_be_positive(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="num_blocks"):
        create_kv_cache(LAYOUT, bad)
    with pytest.raises(InvalidInput, match="num_pages"):
        create_host_cache(LAYOUT, bad)
    with pytest.raises(InvalidInput, match="page_bytes"):
        create_host_cache(bad, 1)


@pytest.mark.parametrize(("page_bytes", "stride"), [(1, 4096), (4096, 4096), (4097, 8192), (100_000, 102_400)])
def test_host_pages_are_aligned_zeroed_and_the_same_memory(page_bytes: int, stride: int) -> None:
    with create_host_cache(page_bytes, 3) as cache:
        assert cache.pages.shape == (3, stride)
        assert cache.pages.dtype == torch.uint8
        assert cache.page_stride == stride
        assert cache.pages.data_ptr() % 4096 == 0
        assert not cache.pages.any()
        page = cache.page(1)
        assert (len(page), page.readonly) == (page_bytes, False)
        page[:] = b"\x07" * page_bytes
        assert int(cache.pages.sum()) == int(cache.pages[1].sum()) == 7 * page_bytes
        cache.pages[2, page_bytes - 1] = 9
        assert cache.page(2)[-1] == 9
        for index in (-1, 3):
            with pytest.raises(InvalidInput, match="does not exist"):
                cache.page(index)


def test_host_cache_takes_a_layout() -> None:
    with create_host_cache(sample_layouts()["odd"], 2) as cache:
        assert cache.page_bytes == sample_layouts()["odd"].page_bytes == 588


def test_closing_unmaps() -> None:
    cache = create_host_cache(4096, 100)
    address = cache.pages.data_ptr()
    assert mapped(address)
    cache.close()
    assert not mapped(address)
    cache.close()
    assert not cache.pinned
    with pytest.raises(ResourceClosed):
        _ = cache.pages
    with pytest.raises(ResourceClosed):
        cache.page(0)


def test_dropping_unmaps_too() -> None:
    cache = create_host_cache(4096, 100)
    address = cache.pages.data_ptr()
    del cache
    assert not mapped(address)


def test_what_is_still_held_stays_mapped() -> None:
    cache = create_host_cache(4096, 4)
    row, page = cache.pages[2], cache.page(3)
    address = cache.pages.data_ptr()
    cache.close()
    row.fill_(5)
    page[0] = 6
    assert mapped(address)
    assert int(row.sum()) == 5 * 4096
    del row
    assert mapped(address)
    assert page[0] == 6
    del page
    assert not mapped(address)


def test_memory_that_cannot_be_had() -> None:
    before = mapped_bytes()
    for page_bytes, num_pages in ((1 << 20, 1 << 42), (1 << 40, 1 << 16), (1 << 60, 1 << 60)):
        with pytest.raises(HostTierUnavailable, match="bytes of host memory cannot be had"):
            create_host_cache(page_bytes, num_pages)
    assert mapped_bytes() == before


class FakeCudart:
    """The CUDA runtime's registration, by the book: an address once, and only what is registered can be let go."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        assert address not in self.registered
        if not self.error:
            self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert mapped(address), "unregistered after it was unmapped"
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error number {error}"


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, cudart=lambda: fake, synchronize=int))
    return fake


def test_pinned_in_exact_size_and_unpinned_once(cudart: FakeCudart) -> None:
    cache = create_host_cache(5000, 3)
    was_pinned = cache.pinned
    assert cudart.registered == {cache.pages.data_ptr(): 3 * 8192}
    held = cache.pages
    cache.close()
    assert (was_pinned, cache.pinned) == (True, False)
    assert cudart.registered == {}
    cache.close()
    assert held.numel() == 3 * 8192


def test_unpinned_before_unmapped_when_dropped(cudart: FakeCudart) -> None:
    cache = create_host_cache(4096, 3)
    address = cache.pages.data_ptr()
    assert list(cudart.registered) == [address]
    del cache
    gc.collect()
    assert cudart.registered == {}
    assert not mapped(address)


def test_a_forked_child_leaves_the_registration_alone(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = create_host_cache(4096, 3)
    address = cache.pages.data_ptr()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    cache.close()
    assert list(cudart.registered) == [address]


def test_memory_that_cannot_be_pinned(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(torch, "zeros", lambda _size, *, device: launched.append(device))
    before = mapped_bytes()
    cudart.error = 2
    with pytest.raises(
        HostTierUnavailable, match="12288 bytes of host memory cannot be pinned: error number 2"
    ) as held:
        create_host_cache(4096, 3)
    assert mapped_bytes() == before, f"the mapping outlives {held.value}"
    assert launched == ["cuda"], "somebody else's kernel would get the error"
    assert cudart.registered == {}


def test_a_driver_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no usable device")

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, cudart=broken))
    with pytest.raises(HostTierUnavailable, match="no usable device"):
        create_host_cache(4096, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_real_pinning() -> None:
    cache = create_host_cache(100_000, 7)
    assert cache.pinned
    assert cache.pages.is_pinned()
    held = cache.pages
    address = held.data_ptr()
    # A second registration of the same memory fails, and its error must not surface in somebody's next kernel.
    assert "already" in str(pin(held.numpy().data, address))
    assert torch.ones(3, device="cuda").sum().item() == 3
    cache.close()
    assert not held.is_pinned()
    del held
    assert not mapped(address)


def test_more_than_there_is_disables_the_tier_and_nothing_else() -> None:
    metrics = Metrics()
    with pytest.raises(HostTierUnavailable, match="are available"):
        create_host_cache(1 << 30, 1 << 20)
    assert open_host_pages(1 << 30, 1 << 20, metrics=metrics) is None
    assert metrics.value("events_total", kind="tier_disabled") == 1
    pages = open_host_pages(4096, 2)
    assert pages is not None
    pages.close()


def test_no_cuda_is_said_at_the_door() -> None:
    if not torch.cuda.is_available():
        layout = gqa_layout(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=4, dtype=DType.BF16)
        with pytest.raises(InvalidInput, match="no CUDA device"):
            create_kv_cache(layout, 1, "cuda")
