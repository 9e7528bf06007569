"""Hit ratio over capacity as a picture: one line per policy, Belady's MIN and the unbounded ratio above them.

The only module that needs matplotlib (the extra `plot`), and only when a picture is wanted; that it is missing is said
before anything is replayed. A picture is written whole or not at all: beside its place first, then moved there.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from headwater.core.errors import InvalidConfig, NotInstalled
from headwater.lab.replay.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = ("png", "svg", "pdf")
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by everybody
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_BOUND: Final = "#444444"


@contextmanager
def canvas(path: Path, formats: Sequence[str] = FORMATS) -> Iterator[BinaryIO]:
    """Yield a file that becomes `path` if all goes well, and nothing if it does not.

    Raises NotInstalled without matplotlib, InvalidConfig for a place where no picture can be.
    """
    try:
        import matplotlib.figure  # noqa: F401  only whether it can be had
    except ModuleNotFoundError as error:
        raise NotInstalled("--plot needs matplotlib: pip install 'headwater[plot]'") from error
    if path.suffix[1:].lower() not in formats:
        raise InvalidConfig(f"--plot {path}: the name must end in one of {', '.join(f'.{one}' for one in formats)}")
    if path.is_dir():
        raise InvalidConfig(f"--plot {path}: that is a directory")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = draft.open("xb")
    except OSError as error:
        raise InvalidConfig(f"--plot {path}: {error.strerror}") from error
    try:
        with file:
            yield file
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def draw(sweep: Sweep, file: BinaryIO, *, format: str) -> None:  # noqa: A002  matplotlib's own word
    """Draw and write. Needs matplotlib."""
    from matplotlib.figure import Figure  # and no pyplot: nothing here outlives the call

    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_bounds(axes, sweep)
    policies = dict.fromkeys(outcome.setup.policy for outcome in sweep.outcomes)
    for number, policy in enumerate(policies):
        points = sorted((one.setup.blocks, one.hit_ratio) for one in sweep.outcomes if one.setup.policy == policy)
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        axes.plot(*zip(*points, strict=True), label=policy, color=colour, marker=marker, linewidth=1.8, markersize=5)
    _dress(axes, sweep)
    figure.savefig(file, format=format)


def _draw_bounds(axes: "Axes", sweep: Sweep) -> None:
    unbounded = sweep.survey.unbounded_hit_ratio
    axes.axhline(unbounded, color=_BOUND, linewidth=1, linestyle=":", label=f"unbounded ({unbounded:.3f})")
    points = sorted({(one.setup.blocks, sweep.bound(one).min_hit_ratio) for one in sweep.outcomes})
    label = "Belady's MIN (knows the future)"
    axes.plot(*zip(*points, strict=True), color=_BOUND, linewidth=1.4, linestyle="--", label=label)


def _dress(axes: "Axes", sweep: Sweep) -> None:
    setup, found = sweep.outcomes[0].setup, sweep.survey
    capacities = sorted({one.setup.blocks for one in sweep.outcomes})
    axes.set_xscale("log")
    axes.set_xticks(_spaced(capacities), labels=[f"{one:,}" for one in _spaced(capacities)])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, min(1.0, 1.12 * max(found.unbounded_hit_ratio, 0.01)))
    behind = f", and {setup.store_blocks:,} in a store behind it" if setup.store_blocks else ""
    axes.set_xlabel(f"blocks of {sweep.trace.block_tokens:,} tokens on the device{behind}")
    axes.set_ylabel("block hit ratio")
    name = Path(sweep.trace.name).name
    title = f"{name}: {found.num_requests:,} requests, {found.num_blocks:,} blocks"
    axes.set_title(title, fontsize=11, parse_math=False)  # a file's name is no formula
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)


def _spaced(capacities: list[int]) -> list[int]:
    """Those of the capacities whose names do not run into each other on a logarithmic axis."""
    shown: list[int] = []
    gap = (max(capacities) / min(capacities)) ** 0.06
    for one in capacities:
        if not shown or one >= shown[-1] * gap:
            shown.append(one)
    return shown
