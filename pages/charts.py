# SPDX-License-Identifier: Apache-2.0
"""Charts of benchmarks/results/, as SVG by matplotlib: each reads the tables of one result page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
#: distinct also with colour blindness
COLOURS = ("#3b7dd8", "#e0722a", "#1f9d7a", "#b8609c")
#: text stays text, and equal results give equal bytes
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fleetlight",
    "font.sans-serif": ["system-ui", "DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.edgecolor": "#bbbbbb",
    "text.color": "#222222",
    "ytick.color": "#555555",
}
_NUMBER = re.compile(r"[\d,]+(?:\.\d+)?")


class Bar(NamedTuple):
    """A value with its name, and the group whose colour it has."""

    name: str
    value: float
    group: int = 0


def charts() -> dict[str, str]:
    """The charts by their paths below docs/."""
    import matplotlib

    made: dict[str, Callable[[], Figure]] = {
        "peers": _peers,
        "ddp": _ddp,
        "slow-link": _slow_link,
        "geo": _geo,
        "durability": _durability,
        "kills": _kills,
        "scaling": _scaling,
        "quality": _quality,
    }
    with matplotlib.rc_context(_STYLE):
        return {f"images/chart-{name}.svg": _svg(draw()) for name, draw in made.items()}


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return re.sub(r" +$", "", written.getvalue(), flags=re.MULTILINE)


def _figure(title: str, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=10)
    axes = figure.add_subplot()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure, axes


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


def bars(title: str, unit: str, values: Sequence[Bar]) -> Figure:
    """Horizontal bars with their values."""
    figure, axes = _figure(f"{title}: {unit}", 0.5 + 0.24 * len(values))
    names, lengths, groups = zip(*values, strict=True)
    drawn = axes.barh(names, lengths, color=[COLOURS[group] for group in groups])
    axes.bar_label(drawn, [_shown(value) for value in lengths], padding=4, color="#555555")
    axes.set_xlim(right=1.12 * max(lengths))
    axes.invert_yaxis()
    axes.set_xticks([])
    return figure


def lines(
    title: str, curves: Mapping[str, list[tuple[float, float]]], events: Mapping[str, float]
) -> Figure:
    """Lines with their names, from zero; `events` are moments, where x is time."""
    figure, axes = _figure(title, 2.4)
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, label=name, marker="" if events else "o", markersize=4)
    for name, x in events.items():
        axes.axvline(x, color="#888888", linewidth=0.8)
        axes.annotate(name, (x, 1.02), xycoords=("data", "axes fraction"), ha="center", size=8)
    if not events:
        axes.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", linewidth=0.6, color="#dddddd")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
    return figure


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _peers() -> Figure:
    rows = rows_of("2026-11-21-peers_ps", "Wide & deep")
    systems = ("fleetlight", "paddle 1.8.5", "paddle 2.6.2")
    values = [
        Bar(f"{system}, {mode}", number(rows[f"{system}, {mode}"][0]), group)
        for mode in ("sync", "async", "geo")
        for group, system in enumerate(systems)
        if f"{system}, {mode}" in rows
    ]
    return bars("Wide & deep, 2 workers and 1 server", "examples/s", values)


def _ddp() -> Figure:
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


def _slow_link() -> Figure:
    rows = rows_of("2026-11-22-slow_link", "One reduction")
    names = ("flat", "plain DDP", "by levels", "by levels, bf16", "by levels, int8")
    values = [
        Bar(name, number(rows[name][0]), int(name.startswith("by")))
        for name in (*names, "by levels, top 1 %")
    ]
    return bars("One sum of 95 MiB, 2 hosts, 200 Mbit/s", "seconds", values)


def _geo() -> Figure:
    rows = rows_of("2026-11-21-geo_link", "Word2vec")
    names = ("async", "geo, k=1", "geo, k=20", "geo, k=100", "geo, k=400")
    values = [Bar(name, number(rows[name][0]), int(name != "async")) for name in names]
    return bars("Word2vec over a link of 200 Mbit/s", "examples/s", values)


def _durability() -> Figure:
    values = [
        Bar(f"{mode}, {kind}", number(cells[0]), group)
        for group, mode in enumerate(("sync", "async"))
        for kind, cells in rows_of("2026-11-23-durability", mode).items()
        if kind in ("none", "snapshot", "log", "none, TLS")
    ]
    return bars("Wide & deep by durability, 2 workers and 1 server", "steps/s", values)


def _quality() -> Figure:
    text = (RESULTS / "2026-11-24-async_quality.md").read_text()
    values = []
    for workers in (2, 4, 8):
        section = text.split(f"## {workers} workers")[1].split("\n## ")[0]
        for group, mode in enumerate(("sync", "async", "geo, k=10")):
            row = next(line for line in section.splitlines() if f"| Adagrad | {mode} |" in line)
            values.append(Bar(f"{workers} workers, {mode}", number(row.split(" | ")[2]), group))
    return bars("Digits, Adagrad: accuracy after 6 epochs", "%", values)


def _scaling() -> Figure:
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
    return lines("Wide & deep with 1 server on 2 cores: examples/s by workers", curves, {})


def _kills() -> Figure:
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
    return lines(
        'Wide & deep in async mode, durability="log": examples/s by seconds', curves, killed
    )
