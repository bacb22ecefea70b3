# SPDX-License-Identifier: Apache-2.0
"""Ways beside a column of boxes, for what does not go to the next one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fleetlight.static.drawing.entries import Wire
from fleetlight.static.drawing.scene import Box, Line, Scene

#: from one track to the next
STEP = 9.0
#: between the last track and the boxes
_AWAY = 14.0
#: more are not told apart: those that are left share the last one
_MOST = 8


class Tracks:
    """What one source gives to others shares one track; short ones are nearest to the boxes."""

    def __init__(self, wires: Iterable[Wire], order: Sequence[int]) -> None:
        #: places in the column of those that have a box
        self._places = {number: place for place, number in enumerate(order)}
        self._wires: dict[int, list[Wire]] = {}
        for wire in wires:
            if abs(self._places[wire.target] - self._places[wire.source]) > 1 or (
                self._places[wire.target] < self._places[wire.source]
            ):
                self._wires.setdefault(wire.source, []).append(wire)
        self._tracks = self._assigned()

    @property
    def room(self) -> float:
        """How much is needed beside the boxes."""
        if not self._tracks:
            return 0.0
        return _AWAY + STEP * (1 + max(self._tracks.values()))

    def _assigned(self) -> dict[int, int]:
        spans = {source: self._span(source) for source in self._wires}
        taken: list[list[tuple[int, int]]] = []
        tracks = {}
        for source, (top, bottom) in sorted(
            spans.items(), key=lambda item: (item[1][1] - item[1][0], item)
        ):
            track = next(
                (
                    number
                    for number, others in enumerate(taken)
                    if all(bottom < first or last < top for first, last in others)
                ),
                len(taken),
            )
            track = min(track, _MOST - 1)
            if track == len(taken):
                taken.append([])
            taken[track].append((top, bottom))
            tracks[source] = track
        return tracks

    def _span(self, source: int) -> tuple[int, int]:
        places = [self._places[source], *(self._places[w.target] for w in self._wires[source])]
        return min(places), max(places)

    def draw(self, scene: Scene, boxes: Mapping[int, Box], edge: float) -> None:
        """Lines at the left of the boxes; `edge` is where the boxes, or what frames them, begin."""
        for source, track in self._tracks.items():
            x = edge - _AWAY - STEP * track
            for wire in self._wires[source]:
                start, end = boxes[source], boxes[wire.target]
                # what leaves, leaves below; what comes, comes above
                leaving = start.middle + start.height / 5
                coming = end.middle - end.height / 5
                points = ((start.x, leaving), (x, leaving), (x, coming), (end.x, coming))
                full = f"{wire.label}\n{wire.full}".strip()
                scene.lines.append(Line(points, "value", full))
