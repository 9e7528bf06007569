"""The document of `/admin/requests/ID` (`serve/explain.py`) as tables for a terminal. Asks nobody."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwater.lab.draw import new_table


def explanation(document: Mapping[str, Any]) -> RenderableType:
    """Every request of an id, its blocks in rows."""
    if not document["requests"]:
        return Text("no request is over yet")
    parts: list[RenderableType] = []
    for one in document["requests"]:
        hit, total = one["hit_blocks"], one["blocks"]
        head = f"{one['id']}  {one['outcome']}, {one['asked_ago_s']:.1f} s ago: {hit} of {total} blocks were hits"
        parts += [Text(head, style="bold"), _rows(one["rows"])]
    return Group(*parts)


def _rows(rows: list[Mapping[str, Any]]) -> Table:
    table = new_table("blocks", "tokens", "from", "computed, because", text=4)
    for row in rows:
        place = [f"{first} to {end - 1}" for first, end in (row["blocks"], row["tokens"])]
        hit = "from" in row
        table.add_row(*place, Text(row["from"]) if hit else "", "" if hit else Text(_because(row)))
    return table


def _because(row: Mapping[str, Any]) -> str:
    facts = dict(row["facts"])
    said = [row["why"].replace("_", " ")]
    if row["tier"] is not None:
        said.append(f"tier {row['tier']}")
    if "token" in facts:
        said.append(f"at token {facts.pop('token')}")
    if "evicted_ago_s" in facts:
        said.append(f"left {facts.pop('evicted_ago_s'):.1f} s ago")
    if "load_s" in facts:
        load, compute, worth = (facts.pop(name) for name in ("load_s", "compute_s", "worth"))
        said.append(
            f"loading {1e3 * load:.3g} ms, computing {1e3 * compute:.3g} ms, of which {worth:.0%} may be loading"
        )
    said += [f"{name.replace('_', ' ')} {value!r}" for name, value in facts.items() if value != ""]
    return ", ".join(said)
