# SPDX-License-Identifier: Apache-2.0
"""The essentials of the page as text, for terminals. Pure."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fleetlight.observe.console import Tone, aligned, fitted, without_control

_HEADS = (
    "process",
    "state",
    "step",
    "per second",
    "step time",
    "waits",
    "slowest part",
    "memory",
    "restarts",
)
_TONES = {"running": Tone.PLAIN, "ended": Tone.DIM, "failed": Tone.BAD, "silent": Tone.WARNING}
#: what a reader wants to see after failures, which have 0
_RANKS = {"running": 1, "ended": 2}
#: events that are shown
_EVENTS = 5
#: columns of a terminal that does not say how many it has
_USUAL_COLUMNS = 80


def text_of(
    whole: Mapping[str, Any],
    columns: int | None,
    colour: bool,
    clock: Callable[[float], str] = lambda at: time.strftime("%H:%M:%S", time.localtime(at)),
    lines: int | None = None,
) -> str:
    """What the page shows of a job, in a terminal of some columns and, if given, lines.

    Where the lines are too few, the fastest workers and the oldest events are left out.
    """

    def text(most: int) -> str:
        return "\n".join(_lines(whole, columns, colour, clock, most))

    everything = max(len(whole["processes"]), len(whole["tables"]), _EVENTS)
    if lines is None:
        return text(everything)
    width = columns or _USUAL_COLUMNS
    fitting = bisect_right(range(1, everything + 1), lines, key=lambda n: _height(text(n), width))
    return _top_of(text(max(1, fitting)), lines, width)


def _lines(
    whole: Mapping[str, Any],
    columns: int | None,
    colour: bool,
    clock: Callable[[float], str],
    most: int,
) -> Iterator[str]:
    """The lines, with at most so many processes, tables and events."""
    yield fitted(_headline(whole), columns)
    if whole["processes"]:
        shown = _most_telling(whole["processes"], most)
        rows = [_row(process, whole["parts"]) for process in shown]
        tones = [Tone.DIM, *(_TONES.get(process["state"], Tone.WARNING) for process in shown)]
        yield ""
        yield aligned([_HEADS, *rows], columns, tones if colour else ())
        yield from _rest(whole["processes"], most)
    if whole["straggler"]:
        one = whole["straggler"]
        yield ""
        yield fitted(f"slowest: {one['name']}, mostly in {one['part']}", columns)
    if whole["tables"]:
        yield ""
        yield from (fitted(_table(table), columns) for table in whole["tables"][:most])
        yield from _rest(whole["tables"], most)
    if events := whole["events"][-min(most, _EVENTS) :]:
        yield ""
        for event in events:
            yield fitted(f"{clock(event['at'])} {event['who']}: {event['text']}", columns)


def _most_telling(processes: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Those that failed, then the slowest, in the order of all; ended ones come last."""

    def rank(place: int) -> tuple[int, float]:
        process = processes[place]
        return _RANKS.get(process["state"], 0), -(process.get("step_s") or math.inf)

    return [processes[place] for place in sorted(sorted(range(len(processes)), key=rank)[:most])]


def _rest(all_of_them: Sequence[Any], most: int) -> list[str]:
    left = len(all_of_them) - most
    return [f"and {left} more"] if left > 0 else []


def _height(text: str, columns: int) -> int:
    """The lines of a terminal, which breaks what is wider."""
    plain = without_control(text.encode()).decode()
    return sum(max(1, -(-len(line) // columns)) for line in plain.split("\n"))


def _top_of(text: str, lines: int, columns: int) -> str:
    """The first lines, as many as a terminal shows."""
    shown = text.split("\n")
    while len(shown) > 1 and _height("\n".join(shown), columns) > lines:
        shown.pop()
    return "\n".join(shown)


def _headline(whole: Mapping[str, Any]) -> str:
    said = [f"{whole['folder']}: {whole['description'].get('mode', 'job')}"]
    if whole["over"]:
        said.append("ended" if whole["code"] is None else f"ended with code {whole['code']}")
    workers = [one for one in whole["processes"] if one["kind"] == "worker"]
    if rate := sum(one.get("rate") or 0 for one in workers):
        said.append(f"{rate:,.0f} samples/s")
    if (mean := whole["staleness"]["mean"]) is not None:
        said.append(f"staleness {mean:.1f}")
    if (hit := whole["hit"]) is not None:
        said.append(f"read ahead {hit:.0%}")
    if whole["skipped"]:
        said.append(f"{whole['skipped']:,.0f} steps skipped")
    for name, values in whole["lines"]["logged"].items():
        if name in whole["not_finite"]:
            said.append(f"{name} NaN or infinite")
        elif (value := next((v for v in reversed(values) if v is not None), None)) is not None:
            said.append(f"{name} {value:.4g}")
    return ", ".join(said)


def _row(process: Mapping[str, Any], parts: Sequence[str]) -> tuple[str, ...]:
    spent = dict(zip(parts, process.get("parts", ()), strict=False))
    whole = sum(spent.values())
    return (
        process["name"],
        process["state"],
        _number(process.get("step"), ",.0f"),
        _number(process.get("pace", process.get("applied")), ",.1f"),
        _number(process.get("step_s"), ".1f", 1000, " ms"),
        _number(spent["wait"] / whole, ".0%") if whole else "",
        max(spent, key=lambda part: spent[part]) if whole else "",
        _number(process.get("memory"), ",.0f", 1 / 2**20, " MiB"),
        str(process["restarts"] or ""),
    )


def _table(table: Mapping[str, Any]) -> str:
    size = sum(table["servers"].values()) / 2**20
    return (
        f"table {table['name']}: {table['rows']:,.0f} rows, {table['growth']:+,.0f} rows/min, "
        f"{size:,.1f} MiB"
    )


def _number(value: float | None, form: str, factor: float = 1, unit: str = "") -> str:
    return "" if value is None else format(value * factor, form) + unit
