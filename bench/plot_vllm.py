"""Draw docs/vllm-h200.png from bench/results/vllm-h200.json: computed again, or loaded, by contender.

    python bench/plot_vllm.py

Needs matplotlib (the extra `plot`). Reads one file, writes one file, measures nothing.
"""

import json
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results" / "vllm-h200.json"
PICTURE: Final = ROOT / "docs" / "vllm-h200.png"
CONTENDERS: Final = {  # name in the results: label, colour
    "plain": ("vLLM alone: computed again", "#999999"),
    "offloading": ("OffloadingConnector: loaded", "#e69f00"),
    "lmcache": ("LMCache: loaded", "#56b4e9"),
    "headwater": ("Headwater: loaded, every byte verified", "#0072b2"),
}


def draw(contenders: dict[str, Any], axes: Axes, *, figure: str, computed: str, title: str, unit: str) -> None:
    """Draw one bar per contender. vLLM alone has no hits after eviction: its bar is what it computes."""
    for at, (name, (label, colour)) in enumerate(CONTENDERS.items()):
        value = contenders[name]["figures"][computed if name == "plain" else figure]
        middle = value["median"]
        spread = [[middle - value["low"]], [value["high"] - middle]]
        axes.barh(at, middle, xerr=spread, color=colour, label=label, capsize=3)
        axes.text(value["high"], at, f"  {middle:,.2f}" if middle < 10 else f"  {middle:,.0f}", va="center", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(unit)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Read the results and write the picture."""
    contenders = json.loads(RESULTS.read_text())["contenders"]
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    draw(
        contenders,
        left,
        figure="32768_hit_ms",
        computed="32768_cold_ms",
        title="one prompt of 32,768 tokens, evicted from the GPU",
        unit="ms to the first token",
    )
    draw(
        contenders,
        right,
        figure="crowd_64_s",
        computed="crowd_64_s",
        title="64 prompts of 2,048 tokens at once, evicted from the GPU",
        unit="seconds until the last answer",
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
