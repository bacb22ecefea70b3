# SPDX-License-Identifier: Apache-2.0
"""Charts of benchmarks/results/, as SVG: each reads the tables of one result page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pages.svg import COLOURS, Drawing

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
#: the width of a drawing, and of its labels
_WIDTH, _LABELS = 480.0, 178.0
_NUMBER = re.compile(r"[\d,]+(?:\.\d+)?")


class Bar(NamedTuple):
    """A value with its name, and the group whose colour it has."""

    name: str
    value: float
    group: int = 0


def charts() -> dict[str, str]:
    """The charts by their paths below docs/."""
    made: dict[str, Callable[[], Drawing]] = {
        "peers": _peers,
        "ddp": _ddp,
        "slow-link": _slow_link,
        "geo": _geo,
        "durability": _durability,
        "kills": _kills,
        "scaling": _scaling,
        "quality": _quality,
    }
    return {f"images/chart-{name}.svg": str(draw()) for name, draw in made.items()}


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The first cell of each row below a heading of a result page, and its other cells."""
    text = (RESULTS / f"{page}.md").read_text()
    _, found, after = text.partition(f"\n## {heading}")
    if not found:
        raise ValueError(f"benchmarks/results/{page}.md has no heading {heading!r}")
    section = after.split("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in table if len(cells) > 1}


def number(cell: str) -> float:
    """The first number of a cell."""
    match = _NUMBER.search(cell)
    if match is None:
        raise ValueError(f"got {cell!r}, expected a number")
    return float(match[0].replace(",", ""))


def bars(title: str, unit: str, values: Sequence[Bar]) -> Drawing:
    """Horizontal bars with their values."""
    step, top = 24.0, 34.0
    drawing = Drawing(_WIDTH, top + step * len(values) + 6, title)
    drawing.text(0, 16, title)
    drawing.text(_WIDTH, 16, unit, "soft", "end")
    most = max(bar.value for bar in values)
    for place, bar in enumerate(values):
        y = top + step * place
        length = (_WIDTH - _LABELS - 62) * bar.value / most
        drawing.text(_LABELS - 8, y + 13, bar.name, at="end")
        drawing.box(_LABELS, y, length, 17, colour=COLOURS[bar.group])
        drawing.text(_LABELS + length + 6, y + 13, _shown(bar.value), "soft")
    return drawing


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _peers() -> Drawing:
    rows = rows_of("2026-11-21-peers_ps", "Wide & deep")
    systems = ("fleetlight", "paddle 1.8.5", "paddle 2.6.2")
    values = [
        Bar(f"{system}, {mode}", number(rows[f"{system}, {mode}"][0]), group)
        for mode in ("sync", "async", "geo")
        for group, system in enumerate(systems)
        if f"{system}, {mode}" in rows
    ]
    return bars("Wide & deep, 2 workers and 1 server", "examples/s", values)


def _ddp() -> Drawing:
    page, beside = (
        "2026-11-22-static_vs_ddp",
        {
            "eager": ("2026-11-20-eager_vs_ddp", "fleetlight / ddp"),
            "program": ("", "static fx / ddp"),
            "compiled": ("", "static inductor / ddp"),
        },
    )
    values = [
        Bar(f"{model}, {kind}", number(rows_of(found or page, heading)[row][0]), group)
        for model, heading in (("MLP", "MLP of 8 layers"), ("ResNet-50", "ResNet-50"))
        for group, (kind, (found, row)) in enumerate(beside.items())
        if row in rows_of(found or page, heading)
    ]
    return bars("Steps per second over those of DDP, 2 processes", "ratio", values)


def _slow_link() -> Drawing:
    rows = rows_of("2026-11-22-slow_link", "One reduction")
    names = ("flat", "plain DDP", "by levels", "by levels, bf16", "by levels, int8")
    values = [
        Bar(name, number(rows[name][0]), int(name.startswith("by")))
        for name in (*names, "by levels, top 1 %")
    ]
    return bars("One sum of 95 MiB, 2 hosts, 200 Mbit/s", "seconds", values)


def _geo() -> Drawing:
    rows = rows_of("2026-11-21-geo_link", "Word2vec")
    names = ("async", "geo, k=1", "geo, k=20", "geo, k=100", "geo, k=400")
    values = [Bar(name, number(rows[name][0]), int(name != "async")) for name in names]
    return bars("Word2vec over a link of 200 Mbit/s", "examples/s", values)


def _durability() -> Drawing:
    values = [
        Bar(f"{mode}, {kind}", number(cells[0]), group)
        for group, mode in enumerate(("sync", "async"))
        for kind, cells in rows_of("2026-11-23-durability", mode).items()
        if kind in ("none", "snapshot", "log", "none, TLS")
    ]
    return bars("Wide & deep by durability, 2 workers and 1 server", "steps/s", values)


def _quality() -> Drawing:
    text = (RESULTS / "2026-11-24-async_quality.md").read_text()
    values = []
    for workers in (2, 4, 8):
        section = text.split(f"## {workers} workers")[1].split("\n## ")[0]
        for group, mode in enumerate(("sync", "async", "geo, k=10")):
            row = next(line for line in section.splitlines() if f"| Adagrad | {mode} |" in line)
            values.append(Bar(f"{workers} workers, {mode}", number(row.split(" | ")[2]), group))
    return bars("Digits, Adagrad: accuracy after 6 epochs", "%", values)


def _scaling() -> Drawing:
    """Examples per second by the number of workers, from the measured column."""
    page = (RESULTS / "2026-11-25-scaling.md").read_text()
    curves: dict[str, list[tuple[float, float]]] = {}
    for mode in ("sync", "async"):
        section = page.split(f"batch 512: {mode}\n")[1].split("\n## ")[0]
        for line in section.splitlines():
            cells = line.strip("| ").split(" | ")
            if len(cells) > 8 and cells[0].endswith("bit/s") and cells[2] == "1":
                point = (float(cells[1]), number(cells[7]))
                curves.setdefault(f"{mode}, {cells[0]}", []).append(point)
    return _lines("Wide & deep with 1 server on 2 cores: examples/s by workers", curves)


def _kills() -> Drawing:
    """Examples per second over time, with a line at each kill."""
    page = "2026-11-27-kills"
    events = rows_of(page, "The kills of the round in the middle")
    rates = rows_of(page, "Examples per second in the round in the middle")
    # the last one is on top
    columns = {"no kill": 3, "both workers": 0, "worker 0": 1, "worker 1": 2}
    curves = {
        name: [(float(at), number(cells[column])) for at, cells in rates.items() if at[0].isdigit()]
        for name, column in columns.items()
    }
    killed = {
        f"{name} killed": number(cells[0])
        for name, cells in events.items()
        if cells[0][0].isdigit()
    }
    return _lines(
        'Wide & deep in async mode, durability="log": examples/s by seconds', curves, killed
    )


def _lines(
    title: str,
    curves: dict[str, list[tuple[float, float]]],
    events: Mapping[str, float] | None = None,
) -> Drawing:
    """Lines with their names; `events` are moments, where x is time."""
    right, top = (148.0, 34.0) if events is None else (122.0, 52.0)
    left, bottom = 52.0, 210.0
    drawing = Drawing(_WIDTH, bottom + 26, title)
    drawing.text(0, 16, title)
    widest = max(x for curve in curves.values() for x, _ in curve)
    ticks = marks(0, max(y for curve in curves.values() for _, y in curve))
    most = ticks[-1]

    def across(x: float) -> float:
        return left + (_WIDTH - left - right) * x / widest

    for tick in ticks:
        y = bottom - (bottom - top) * tick / most
        drawing.line(left, y, _WIDTH - right, y)
        drawing.text(left - 6, y + 4, f"{tick:,.0f}", "soft", "end")
    points = sorted({x for curve in curves.values() for x, _ in curve})
    for x in points if events is None else [one for one in marks(0, widest) if one <= widest]:
        drawing.text(across(x), bottom + 18, f"{x:g}", "soft", "middle")
    for name, x in (events or {}).items():
        drawing.line(across(x), top - 8, across(x), bottom)
        drawing.text(across(x), top - 12, name, "soft", "middle")
    for place, (name, curve) in enumerate(curves.items()):
        drawing.curve(
            [(across(x), bottom - (bottom - top) * y / most) for x, y in curve],
            COLOURS[place],
            dots=events is None,
        )
        y = top + 20 * place
        drawing.line(_WIDTH - right + 10, y, _WIDTH - right + 26, y, COLOURS[place])
        drawing.text(_WIDTH - right + 32, y + 4, name, "soft")
    return drawing


def marks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that span the values."""
    span = (high - low) or 1.0
    power: float = 10 ** math.floor(math.log10(span / count))
    step = next(power * of for of in (1, 2, 5, 10) if span / (power * of) <= count)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]
