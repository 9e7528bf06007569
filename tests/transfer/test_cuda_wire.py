"""What of a GPU's wires needs no GPU: how copies are put together."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headwater.transfer.device.cuda_wire import _even_runs

ROW = 4096


class Counting(list[int]):
    """Addresses, and how often they were looked at."""

    num_looks = 0

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        self.num_looks += 1
        return super().__getitem__(at)


ORDERS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@given(ORDERS, ORDERS)
def test_runs_are_all_of_them_in_order_and_even_on_both_sides(hosts: list[int], devices: list[int]) -> None:
    number = min(len(hosts), len(devices))
    hosts, devices = hosts[:number], devices[:number]
    runs = list(_even_runs(hosts, devices))
    assert [at for run in runs for at in range(*run)] == list(range(number))
    for start, end in runs:
        for side in (hosts, devices):
            pitches = {after - before for before, after in itertools.pairwise(side[start:end])}
            assert len(pitches) <= 1
            assert all(pitch > 0 for pitch in pitches)


def test_rows_in_a_row_are_one_copy() -> None:
    rows = list(range(0, 64 * ROW, ROW))
    assert list(_even_runs(rows, rows)) == [(0, 64)]
    assert len(list(_even_runs(rows, rows[:32] + [row + ROW for row in rows[32:]]))) == 2


def test_blocks_in_descending_order_are_each_looked_at_a_few_times() -> None:
    """As vLLM gives them once its pool was used: it frees a request's last block first."""
    hosts, devices = Counting(range(0, 1024 * ROW, ROW)), Counting(range(1024 * ROW, 0, -ROW))
    assert len(list(_even_runs(hosts, devices))) == 1024
    assert hosts.num_looks + devices.num_looks < 16 * 1024
