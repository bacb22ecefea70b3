# SPDX-License-Identifier: Apache-2.0
"""Diagrams of the explanation pages, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pages.svg import COLOURS, Drawing

_WIDTH = 480.0
_BLUE, _ORANGE, _GREEN = COLOURS[:3]


class Span(NamedTuple):
    """A part of a time line."""

    start: float
    end: float
    text: str = ""
    #: "" for waiting
    colour: str = _BLUE


def diagrams() -> dict[str, str]:
    """The diagrams by their paths below docs/."""
    made = {
        "topology": _topology(),
        "mode-sync": _sync(),
        "mode-async": _async(),
        "mode-staleness": _staleness(),
        "mode-geo": _geo(),
        "sharding": _sharding(),
        "hierarchy": _hierarchy(),
        "journal": _journal(),
    }
    return {f"images/{name}.svg": str(drawing) for name, drawing in made.items()}


def _topology() -> Drawing:
    drawing = Drawing(_WIDTH, 196, "Workers and parameter servers of a job")
    for place, (x, name) in enumerate(((20, "worker 0"), (180, "worker 1"), (340, "worker 2"))):
        drawing.box(x, 8, 120, 40, name, _BLUE)
        for server in (90, 270):
            drawing.arrow(x + 60, 50, server + 60 + 14 * (place - 1), 128)
    for x, name in ((90, "server 0"), (270, "server 1")):
        drawing.box(x, 130, 120, 40, name, _GREEN)
    drawing.text(
        _WIDTH / 2, 188, "Workers push gradients, and pull rows and dense values.", at="middle"
    )
    return drawing


def _timeline(title: str, lanes: Mapping[str, Sequence[Span]], notes: Sequence[str]) -> Drawing:
    """Lanes of spans, from time 0 to 100, with notes below."""
    left, top, step = 74.0, 8.0, 34.0
    height = top + step * len(lanes) + 18 * len(notes) + 12
    drawing = Drawing(_WIDTH, height, title)
    scale = (_WIDTH - left - 6) / 100
    for place, (name, spans) in enumerate(lanes.items()):
        y = top + step * place
        drawing.text(0, y + 18, name)
        for span in spans:
            x, width = left + span.start * scale, (span.end - span.start) * scale
            shown = span.text if width > 8 * len(span.text) else ""
            drawing.box(x, y, width - 1, 26, shown, span.colour)
    for place, note in enumerate(notes):
        drawing.text(0, top + step * len(lanes) + 14 + 18 * place, note, "soft")
    return drawing


def _steps(times: Sequence[tuple[float, float]], first: int = 1) -> list[Span]:
    return [Span(start, end, str(number)) for number, (start, end) in enumerate(times, first)]


def _waits(*times: tuple[float, float]) -> list[Span]:
    return [Span(start, end, "waits", "") for start, end in times]


def _sync() -> Drawing:
    fast = _steps([(0, 18), (30, 48), (60, 78)]) + _waits((18, 30), (48, 60), (78, 90))
    slow = _steps([(0, 27), (30, 57), (60, 87)])
    server = [Span(at, at + 3, "", _GREEN) for at in (27, 57, 87)]
    notes = ["The server makes one update of each step, from the gradients of all workers."]
    lanes = {"worker 0": fast, "worker 1": slow, "server": server}
    return _timeline("Time line of the sync mode", lanes, notes)


def _async() -> Drawing:
    fast = _steps([(18 * n, 18 * n + 18) for n in range(5)])
    slow = _steps([(27 * n, 27 * n + 27) for n in range(3)])
    times = sorted({18 * n for n in range(1, 6)} | {27 * n for n in range(1, 4)})
    server = [Span(at, at + 3, "", _GREEN) for at in times]
    notes = ["The server makes an update of each push that arrives. No worker waits."]
    lanes = {"worker 0": fast, "worker 1": slow, "server": server}
    return _timeline("Time line of the async mode", lanes, notes)


def _staleness() -> Drawing:
    fast = _steps([(0, 18), (18, 36), (36, 54), (58, 76), (87, 100)]) + _waits((54, 58), (76, 87))
    slow = _steps([(29 * n, 29 * n + 29) for n in range(3)])
    notes = [
        "With staleness=1, worker 0 starts step 4 once worker 1 has made step 2,",
        "and step 5 once worker 1 has made step 3.",
    ]
    lanes = {"worker 0": fast, "worker 1": slow}
    return _timeline("Time line with bounded staleness", lanes, notes)


def _geo() -> Drawing:
    lanes: dict[str, Sequence[Span]] = {}
    for name, length in (("worker 0", 8.0), ("worker 1", 10.0)):
        times = [(length * n, length * n + length) for n in range(int(98 / length))]
        lanes[name] = _steps(times)
    exchanges = sorted({8.0 * n for n in (4, 8, 12)} | {10.0 * n for n in (4, 8)})
    lanes["server"] = [Span(at, at + 2.4, "", _GREEN) for at in exchanges]
    notes = [
        "With k_steps=4, a worker trains its own copies for 4 steps. Then it",
        "exchanges differences with the server, while it makes the next steps.",
    ]
    return _timeline("Time line of GeoSGD", lanes, notes)


def _sharding() -> Drawing:
    """Four steps of two workers with batches of 3."""
    drawing = Drawing(_WIDTH, 178, "How fleet.shard deals blocks of records to workers")
    size, left = 34.0, 10.0
    drawing.text(left, 16, "The order of the epoch, as of one process with a batch of 6:")
    for place in range(12):
        x, y = left + size * place + 14 * (place // 6), 28.0
        colour = _BLUE if place % 6 < 3 else _ORANGE
        drawing.box(x, y, size - 3, 26, str(place), colour)
    drawing.text(left + size * 3, 74, "step 1", "soft", "middle")
    drawing.text(left + size * 9 + 14, 74, "step 2", "soft", "middle")
    for row, (name, colour) in enumerate((("worker 0", _BLUE), ("worker 1", _ORANGE))):
        y = 92.0 + 36 * row
        drawing.text(left, y + 17, name)
        for step in range(2):
            for place in range(3):
                record = 6 * step + 3 * row + place
                x = left + 80 + size * place + 140 * step
                drawing.box(x, y, size - 3, 26, str(record), colour)
    drawing.text(
        left, 172, "A position counts records, so another number of workers can resume.", "soft"
    )
    return drawing


def _hierarchy() -> Drawing:
    drawing = Drawing(_WIDTH, 196, "A sum by levels over two hosts")
    for host, x in enumerate((6.0, 250.0)):
        drawing.box(x, 6, 224, 148)
        drawing.text(x + 112, 24, f"host {host}", at="middle")
        drawing.box(x + 10, 104, 92, 34, f"worker {2 * host}", _BLUE)
        drawing.box(x + 122, 104, 92, 34, f"worker {2 * host + 1}", _BLUE)
        drawing.box(x + 66, 42, 92, 30, "leader", _GREEN)
        drawing.arrow(x + 56, 103, x + 96, 74)
        drawing.arrow(x + 168, 103, x + 128, 74)
    drawing.arrow(164, 52, 315, 52)
    drawing.arrow(315, 62, 164, 62)
    drawing.text(
        0,
        174,
        "1. A leader sums in the shared memory of its host. 2. Leaders exchange",
        "soft",
    )
    drawing.text(
        0, 190, "their sums, perhaps compressed. 3. Each gives the result to its host.", "soft"
    )
    return drawing


def _journal() -> Drawing:
    drawing = Drawing(_WIDTH, 232, "What a server with a log writes, and how it recovers")
    drawing.text(0, 16, "While it serves")
    for x, text, colour in ((0, "push 41", _BLUE), (136, "log: 41", _GREEN), (272, "table", "")):
        drawing.box(x, 26, 104, 32, text, colour)
    drawing.arrow(105, 42, 134, 42)
    drawing.arrow(241, 42, 270, 42)
    drawing.text(388, 40, "then it replies")
    drawing.text(388, 56, "to the worker", "soft")
    drawing.text(0, 92, "On its disk")
    drawing.box(0, 102, 150, 32, "snapshot up to 30", _ORANGE)
    for place, number in enumerate((31, 32, 33)):
        drawing.box(158 + 62 * place, 102, 56, 32, str(number), _GREEN)
    drawing.text(352, 122, "...")
    drawing.box(374, 102, 56, 32, "41", _GREEN)
    drawing.text(0, 168, "After a kill")
    for x, text in ((0, "loads the snapshot"), (170, "repeats 31 to 41"), (330, "serves again")):
        drawing.box(x, 178, 140, 32, text)
    drawing.arrow(141, 194, 168, 194)
    drawing.arrow(311, 194, 328, 194)
    drawing.text(
        0,
        228,
        "A worker repeats a push that has no reply; the server applies each once.",
        "soft",
    )
    return drawing
