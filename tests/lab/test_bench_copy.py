"""The benchmark of copies: that it measures what it says, and sees a wrong byte. Never how fast."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import InvalidConfig
from headwater.lab.bench import copy, copy_course, copy_gemm
from headwater.lab.bench.copy_course import CopyCourse, CopyRows, cut_frames, finish, frame_stride
from headwater.lab.bench.copy_gemm import Gemm
from headwater.lab.bench.copy_paths import Limit
from headwater.layout.frame import frame_bytes
from headwater.testing.layouts import randomise
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from headwater.transfer.device.torch_wire import TorchWire
from headwater.transfer.device.transfer import Transfer
from headwater.transfer.device.wire import Digests, Direction

ROW = {"layout", "blocks", "bytes", "correct", "d2h_ratio", "h2d_ratio", "both_ratio", "gemm_slowdown", "submit_ms"}
ROW |= {"d2h_ratio_plain", "h2d_ratio_plain", "d2h_ratio_scattered", "h2d_ratio_scattered", "d2h_ratio_batch"}
TINY = ["--device", "cpu", "--rounds", "1", "--layouts", "gqa-16", "--blocks"]


def test_a_run_without_a_gpu() -> None:
    arguments = ["bench", "copy", "--device", "cpu", "--rounds", "1", "--layouts", "gqa-16,dsa", "--blocks", "8,1"]
    found = CliRunner().invoke(app, [*arguments, "--max-bytes", f"{20 << 20}", "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert "no CUDA device" in found.stderr
    assert document["command"] == "bench copy"
    assert document["device"] == "cpu"
    assert document["gpu"] is None
    assert document["correct"] is True
    assert document["options"]["blocks"] == [1, 8]
    assert [(row["layout"], row["blocks"]) for row in document["rows"]] == [
        ("gqa-16", 1),
        ("gqa-16", 8),
        ("dsa", 1),
        ("dsa", 8),
    ]
    *measured, skipped = document["rows"]
    assert "max-bytes" in skipped["skipped"]
    assert not set(skipped) & {"correct", "d2h_ratio"}
    for row in measured:
        assert set(row) >= ROW
        assert row["correct"] is True
        assert row["bytes"] == row["blocks"] * copy.layouts()[row["layout"]].page_bytes
        assert min(row["d2h_ratio"], row["h2d_ratio"], row["both_ratio"], row["d2h_ratio_plain"]) > 0
        assert row["submit_ms"] > 0
        assert (row["d2h_ratio_scattered"] is None) == (row["blocks"] == 1)
        assert row["gemm_slowdown"] is row["d2h_ratio_batch"] is None, "they need a GPU"
        assert len(document["samples"][f"{row['layout']} {row['blocks']} d2h_ratio"]) == 3
    assert document["staging_bytes"] == document["leaked_bytes"] == document["steady_allocations"] == 0
    assert document["whole_correct"] is True
    assert document["whole_in_place"] is True
    assert document["whole_bytes"] == document["whole_blocks"] * copy.layouts()["gqa-64"].page_bytes
    assert len(document["samples"]["load_gbs"]) == 2 * len(document["samples"]["store_gbs"]) == 4
    assert document["store_ratio"] > 0
    assert document["load_ratio"] > 0


def test_a_table_for_people() -> None:
    found = CliRunner().invoke(app, ["bench", "copy", *TINY, "1"])
    assert found.exit_code == 0, found.output
    assert "gqa-16" in found.stdout
    assert "through cache and index" in found.stdout


def test_nothing_fits() -> None:
    report = copy.run(copy.CopyOptions(device="cpu", layouts=("mla",), blocks=(1, 2), max_bytes=4096))
    assert all("skipped" in row for row in report.results["rows"])
    assert "store_gbs" not in report.results
    json.dumps(report.document(), allow_nan=False)


@pytest.mark.parametrize("place", ["is full", "is a disk"])
def test_a_store_without_room_in_memory_is_skipped(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "is full":
        monkeypatch.setattr("headwater.lab.bench.copy_whole.directory.free_bytes", lambda path: 0)
    else:
        monkeypatch.setattr("headwater.lab.bench.copy_whole.directory.is_memory", lambda path: False)
    report = copy.run(copy.CopyOptions(device="cpu", layouts=("gqa-16",), blocks=(1,), rounds=1))
    assert "are not free in memory" in report.results["whole_skipped"]
    assert report.results["correct"] is True
    assert "store_gbs" not in report.results


@pytest.mark.parametrize("direction", list(Direction))
def test_a_wrong_byte_is_seen(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that differ from what they are digested as, on either way."""
    move = TorchWire.finish

    def spoil(self: TorchWire, place: int, **options: Any) -> Digests | None:
        piece = self._pieces[place]
        found = move(self, place, **options)
        if piece is not None and self._direction is direction:
            if direction is Direction.OUT:
                piece.frames[0][-1] ^= 1
            else:
                self._rows[-1][int(piece.slots[0])][-1] ^= 1
        return found

    monkeypatch.setattr(TorchWire, "finish", spoil)
    monkeypatch.setattr("headwater.lab.bench.copy_whole.run", lambda *args, **options: {})
    found = CliRunner().invoke(app, ["bench", "copy", *TINY, "2", "--json"])
    assert found.exit_code == 1
    document = json.loads(found.stdout)
    assert document["correct"] is document["rows"][0]["correct"] is False


def test_another_digest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_course, "plane_digests", lambda payload, sizes: [0] * len(sizes))
    report = copy.run(copy.CopyOptions(device="cpu", layouts=("gqa-16",), blocks=(1,), rounds=1))
    assert report.results["correct"] is False


@pytest.mark.parametrize(
    "options",
    [{"layouts": ("gqa",)}, {"blocks": (0,)}, {"rounds": 0}, {"max_bytes": 0}, {"device": "tpu"}],
)
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        copy.CopyOptions(**options)


def test_the_layouts_are_whole_models() -> None:
    sizes = {name: (len(layout.planes), layout.page_bytes) for name, layout in copy.layouts().items()}
    assert sizes["gqa-64"] == (64, 8 << 20)
    assert sizes["gqa-16"] == (64, 2 << 20)
    assert sizes["gqa-fp8"] == (128, (4 << 20) + 64 * 1024)
    assert sizes["mla"] == (61, 61 * 72 * 1024)
    assert sizes["dsa"] == (122, 61 * 64 * (656 + 132))
    assert len(set(copy.layouts()["mixed"].plane_bytes)) == 2


# --- its parts --------------------------------------------------------------------------------------------------------


def test_rows_in_another_order_are_the_same_pairs() -> None:
    frames = [memoryview(bytes([i])) for i in range(3)]
    rows = CopyRows([5, 6, 7], [1, 2, 3], frames).shuffled([2, 0, 1])
    assert (rows.sources, rows.targets) == ([7, 5, 6], [3, 1, 2])
    assert [frame[0] for frame in rows.frames] == [2, 0, 1]


def test_both_directions_share_no_frame() -> None:
    layout = sample_layouts()["odd"]
    with (
        create_kv_cache(layout, 8) as cache,
        create_host_cache(5 * frame_stride(layout), 1) as host,
        CopyEngine(cache) as engine,
        CopyEngine(cache, digests=False) as plain,
    ):
        frames = cut_frames(host.page(0), layout)
        assert [len(frame) for frame in frames] == [frame_bytes(layout.plane_bytes)] * 5
        limit = Limit(host.page(0), cache.device)
        for count, both in ((1, 1), (2, 2), (4, 2)):
            course = CopyCourse(cache, (engine, plain), limit, frames, ids=range(8), num_blocks=count)
            assert course.both_blocks == both
            course.check()
            course.take(1, baselines=False)
            assert course.correct
            assert set(course.rows.sources).isdisjoint(course.rows.targets)
        limit.close()


class FakeGemm:
    """Windows as long as it was told."""

    def __init__(self, windows_s: list[float]) -> None:
        self.windows_s = windows_s

    def window_s(self) -> float:
        return self.windows_s.pop(0)


def with_engine(use: Callable[[Callable[[], Transfer]], None]) -> None:
    """Hand over a gather of two odd blocks."""
    layout = sample_layouts()["odd"]
    with (
        create_kv_cache(layout, 2) as cache,
        create_host_cache(frame_bytes(layout.plane_bytes), 2) as host,
        CopyEngine(cache) as engine,
    ):
        randomise(cache, seed=1)
        use(lambda: engine.gather([0, 1], [host.page(0), host.page(1)]))


def test_a_slowdown_is_the_median_of_windows_beside_copies() -> None:
    warm_up = [1.0, 9.0, 9.0] * 3
    windows = [2.0, 2.0, 3.0, 4.0, 4.0, 8.0, 2.0, 20.0, 4.0]  # alone, out, in

    def use(submit: Callable[[], Transfer]) -> None:
        gemm = FakeGemm([*warm_up, *windows])
        found = copy_gemm.slowdowns(cast(Gemm, gemm), {"out": submit, "in": submit}, 3)
        assert found == {"out": 1.0, "in": 2.0}
        assert not gemm.windows_s

    with_engine(use)


def test_copies_go_on_beside_products_until_they_are_stopped() -> None:
    begun: list[Transfer] = []

    def use(submit: Callable[[], Transfer]) -> None:
        def count() -> Transfer:
            begun.append(submit())
            return begun[-1]

        with copy_gemm._copying(count):
            while len(begun) < 3:
                pass

    with_engine(use)
    assert all(transfer.over for transfer in begun)
    assert all(finish(transfer).num_good == 2 for transfer in begun[:-1])


def test_a_copy_that_fails_beside_products_is_raised() -> None:
    def fail() -> Transfer:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"), copy_gemm._copying(fail):
        pass
