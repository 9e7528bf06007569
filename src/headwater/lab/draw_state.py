"""A state document (`serve/state.py`) as tables for a terminal: what `headwater top` shows. Asks nobody."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwater.lab.draw import size

_STATES = {
    "closed": ("in use", "green"),
    "half_open": ("being tried", "yellow"),
    "open": ("left alone", "yellow"),
    "off": ("off", "bold red"),
    "unused": ("not used", "yellow"),
    "usable": ("usable", "green"),
    "full": ("full", "yellow"),
    "draining": ("draining", "yellow"),
    "resting": ("resting", "bold red"),
    "unproven": ("unproven", "bold red"),
}
_NUM_FLIGHTS, _NUM_EVENTS = 8, 6


def screen(state: Mapping[str, Any]) -> RenderableType:
    """Everything on one screen."""
    parts: list[RenderableType] = [_head(state), *_troubles(state)]
    if state["fleet"] is not None:
        parts.append(_fleet(state["fleet"]["nodes"]))
    if state["tiers"]:
        parts += [_tiers(state["tiers"]), _misses(state)]
    parts += [_flights(state["requests"]), _events(state["events"])]
    return Group(*parts)


def _head(state: Mapping[str, Any]) -> Text:
    names = [state["name"], state["role"], state["model"]]
    text = Text("  ".join(str(name) for name in names if name), style="bold")
    if state["hit_ratio"] is not None:
        seconds = state["seconds"]
        net = seconds["saved_total"] - seconds["lost_total"]
        text.append(f"   hit ratio {100 * state['hit_ratio']:.1f} %, {net:+.3g} s saved", style="not bold")
    if state["engine"] is not None:
        engine = state["engine"]
        text.append(f"   {engine['running']} running, {engine['waiting']} waiting", style="not bold")
    return text


def _troubles(state: Mapping[str, Any]) -> list[Text]:
    found = [Text("it does not answer requests", style="bold red")] if not state["ready"] else []
    if state["brain"]["failed"] is not None:
        found.append(Text(f"brain failed: {state['brain']['failed']} (headwater revive)", style="bold red"))
    found += [
        Text(f"{tier['name']} is off: {tier['why']} (headwater revive {tier['name']})", style="bold red")
        for tier in state["tiers"]
        if tier["state"] == "off"
    ]
    return found


def _tiers(tiers: list[Mapping[str, Any]]) -> Table:
    table = _table("tier", "state", *("used", "limit", "hit tokens", "saved", "lost", "loads at", "saves at"))
    for tier in tiers:
        table.add_row(
            Text(tier["name"]),
            _state(tier["state"]),
            *map(_size, (tier["used_bytes"], tier["limit_bytes"])),
            f"{tier['hit_tokens']:,.0f}",
            *(f"{tier[name]:.3g} s" for name in ("saved_s", "lost_s")),
            *(_size(tier[name], "/s") for name in ("load_bytes_per_s", "save_bytes_per_s")),
        )
    return table


def _misses(state: Mapping[str, Any]) -> Text:
    said = ", ".join(f"{one['reason']} {one['percent']:.1f} %" for one in state["misses"])
    return Text(f"{state['miss_tokens']:,.0f} tokens missed: {said}" if said else "nothing missed", style="dim")


def _fleet(nodes: list[Mapping[str, Any]]) -> Table:
    table = _table("node", "state", "role", "running", "waiting", "free slots", "lease left")
    for node in nodes:
        table.add_row(
            Text(node["name"]),
            _state(node["state"]),
            node["role"],
            *(f"{node[name]:,}" for name in ("running", "waiting", "free_slots")),
            f"{node['lease_left_s'] or 0:.1f} s",
        )
    return table


def _flights(requests: Mapping[str, Any]) -> RenderableType:
    phases = ", ".join(f"{num} {phase}" for phase, num in requests["phases"].items())
    line = Text(f"{requests['in_flight']} in flight" + (f": {phases}" if phases else ""))
    if not requests["oldest"]:
        return line
    table = _table("request", "phase", "age", "prompt", "cached", "said")
    for one in requests["oldest"][:_NUM_FLIGHTS]:
        numbers = [one[name] for name in ("prompt_tokens", "cached_tokens", "generated_tokens")]
        age = "" if one["age_s"] is None else f"{one['age_s']:.1f} s"
        told = ("" if number is None else f"{number:,}" for number in numbers)
        table.add_row(Text(one["id"], overflow="ellipsis", no_wrap=True), Text(one["phase"]), age, *told)
    return Group(line, table)


def _events(events: list[Mapping[str, Any]]) -> Text:
    text = Text()
    for event in events[:_NUM_EVENTS]:
        facts = ", ".join(f"{name} {value}" for name, value in event["facts"].items())
        text.append(f"{time.strftime('%H:%M:%S', time.localtime(event['at_s']))}  {event['kind']}  {facts}\n", "dim")
    return text


def _table(*columns: str) -> Table:
    """The first two, or so, are words; the rest are numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 2 or name in ("role", "phase") else "right", no_wrap=True)
    return table


def _state(state: str | None) -> Text:
    return Text(*_STATES.get(state or "", (state or "not known", "")))


def _size(num_bytes: float | None, unit: str = "") -> str:
    return "-" if num_bytes is None else size(int(num_bytes)) + unit
