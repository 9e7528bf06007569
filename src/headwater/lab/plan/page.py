"""A plan as a picture: hit ratio over size, and money over size, for each tier alone; as .html with the table below it.

Needs matplotlib (the extra `plot`). A page needs nothing else: the picture stands in it.
"""

import io
from html import escape
from typing import TYPE_CHECKING, BinaryIO, Final

from headwater.lab.plan.answer import remarks, sentence, sizes
from headwater.lab.plan.paces import TIERS
from headwater.lab.plan.search import Plan
from headwater.lab.replay.plot import FORMATS as PICTURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS: Final = (*PICTURES, "html")
HEADINGS: Final = ("choice", "hit ratio", "saved s", "gained a month", "spent a month", "kept a month")
_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}svg{width:100%;height:auto;background:#fff}table{border-collapse:collapse}"
    "th,td{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #8888}"
    "th:first-child,td:first-child{text-align:left}tr.best{font-weight:bold}"
)


def write(plan: Plan, file: BinaryIO, *, format: str) -> None:  # noqa: A002  matplotlib's own word
    """Draw, or write the page."""
    if format == "html":
        file.write(_page(plan).encode())
    else:
        _figure(plan).savefig(file, format=format)


def table_rows(plan: Plan) -> list[tuple[bool, tuple[str, ...]]]:
    """Every choice that was replayed, the smallest first, and whether it is the best."""
    rows = sorted(plan.rows.values(), key=lambda row: (sum(map(bool, row.amounts)), row.spent, row.amounts))
    return [
        (
            row is plan.best,
            (
                sizes(row.amounts),
                f"{row.outcome.hit_ratio:.4f}",
                f"{row.outcome.saved_s:,.0f}",
                *(f"{amount:,.2f}" for amount in (row.gained, row.spent, row.net)),
            ),
        )
        for row in rows
    ]


def _page(plan: Plan) -> str:
    drawn = io.BytesIO()
    _figure(plan).savefig(drawn, format="svg")
    picture = drawn.getvalue().decode()
    picture = picture[picture.index("<svg") :]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in HEADINGS)
    body = "".join(
        f"<tr{' class=best' if best else ''}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for best, cells in table_rows(plan)
    )
    name, said = escape(plan.trace.name), escape(sentence(plan))
    more = "".join(f"<li>{escape(remark)}</li>" for remark in remarks(plan))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Plan for {name}</title><style>{_STYLE}</style>'
        f"<h1>Plan for {name}</h1><p><strong>{said}</strong></p><ul>{more}</ul>"
        f'<figure role="img" aria-label="Hit ratio and money over the size of each tier">{picture}</figure>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>\n"
    )


def _figure(plan: Plan) -> "Figure":
    from matplotlib.figure import Figure  # and no pyplot: nothing here outlives the call

    figure = Figure(figsize=(11, 6), dpi=150, layout="constrained")
    tiers = plan.tried or list(TIERS)
    axes = figure.subplots(2, len(tiers), sharey="row", squeeze=False)
    for i, tier in enumerate(tiers):
        _draw_tier(plan, tier, axes[0][i], axes[1][i])
    axes[0][0].set_ylabel("block hit ratio")
    axes[1][0].set_ylabel("money a month")
    for row in axes:
        row[0].legend(frameon=False, fontsize=8)
    figure.suptitle(sentence(plan), fontsize=9, parse_math=False, wrap=True)
    return figure


def _draw_tier(plan: Plan, tier: str, hits: "Axes", money: "Axes") -> None:
    rows, at = plan.curve(tier), TIERS.index(tier)
    spots = list(range(len(rows)))
    names = [f"{row.amounts[at]:,g}" for row in rows]
    hits.plot(spots, [row.outcome.hit_ratio for row in rows], color="#0072b2", marker="o")
    hits.axhline(plan.survey.unbounded_hit_ratio, color="#444444", linewidth=1, linestyle=":", label="unbounded")
    hits.set_ylim(0, 1.05 * max(0.01, plan.survey.unbounded_hit_ratio))
    hits.set_title(tier)
    money.plot(spots, [row.gained for row in rows], color="#009e73", marker="o", label="gained")
    money.plot(spots, [row.spent for row in rows], color="#d55e00", marker="s", label="spent")
    best = max(rows, key=lambda row: row.net)
    money.axvline(rows.index(best), color="#444444", linestyle=":", label="most is kept")
    money.set_xlabel(f"GiB of {tier}, alone")
    for axes in (hits, money):
        axes.set_xticks(spots, labels=names)
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
