# SPDX-License-Identifier: Apache-2.0
"""The essentials of the page as text, for terminals. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleetlight.observe.console import Tone, aligned, fitted

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
#: events that are shown
_EVENTS = 5


def text_of(
    whole: Mapping[str, Any],
    columns: int | None,
    colour: bool,
    clock: Callable[[float], str] = lambda at: time.strftime("%H:%M:%S", time.localtime(at)),
) -> str:
    """What the page shows of a job, in a terminal of some columns."""
    parts = whole["parts"]
    rows = [_row(process, parts) for process in whole["processes"]]
    tones = [_TONES.get(process["state"], Tone.WARNING) for process in whole["processes"]]
    heads = [Tone.DIM, *tones] if colour else ()
    lines = [fitted(_headline(whole), columns)]
    if rows:
        lines += ["", aligned([_HEADS, *rows], columns, heads)]
    if whole["straggler"]:
        one = whole["straggler"]
        lines += ["", fitted(f"slowest: {one['name']}, mostly in {one['part']}", columns)]
    lines += [""] if whole["tables"] else []
    lines += [fitted(_table(table), columns) for table in whole["tables"]]
    events = whole["events"][-_EVENTS:]
    lines += [""] if events else []
    lines += [
        fitted(f"{clock(event['at'])} {event['who']}: {event['text']}", columns) for event in events
    ]
    return "\n".join(lines)


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
        if (value := next((v for v in reversed(values) if v is not None), None)) is not None:
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
