# SPDX-License-Identifier: Apache-2.0
"""At the right of backward: gradients are gathered, reduced while backward goes on, waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fleetlight.static.drawing.scene import SMALL, Box, Line, Scene, Text
from fleetlight.static.drawing.travels import Travel
from fleetlight.static.drawing.words import counted, mib

#: between backward and the first lane
_AWAY = 34.0
#: a lane with texts, one with upright texts, and one without
_WIDE, _SLIM, _THIN = 112.0, 32.0, 14.0
#: between the upper end of a bar and the step
_ARROW = 16.0
#: between the lower end of a bar and the box that its last gradient comes from
_ABOVE = 4.0


@dataclasses.dataclass(frozen=True)
class Lanes:
    """One for each travel, the first to begin farthest to the right, so that no line crosses."""

    travels: tuple[Travel, ...]

    @property
    def lane(self) -> float:
        """How wide one is."""
        count = sum(travel.reductions > 0 for travel in self.travels)
        return _WIDE if count <= 6 else _SLIM if count <= 24 else _THIN

    @property
    def room(self) -> float:
        """How wide all are, with what is before them."""
        return _AWAY + sum(map(self._width, self.travels)) if self.travels else 0.0

    def _width(self, travel: Travel) -> float:
        return self.lane if travel.reductions else _SLIM

    def draw(self, scene: Scene, backward: Mapping[int, Box], top: float, step: float) -> None:
        """`top` is where backward ends, and `step`, above, where the step begins."""
        x = max((box.right for box in backward.values()), default=0.0) + _AWAY
        sharing = _sharing(self.travels)
        for number in reversed(range(len(self.travels))):
            travel = self.travels[number]
            width = self._width(travel)
            lane = _Lane(travel, x, width, backward, (top, step))
            lane.draw(scene)
            lane.gather(scene, {stage: sharing[stage].index(number) for stage in travel.stages})
            x += width


@dataclasses.dataclass(frozen=True)
class _Lane:
    travel: Travel
    x: float
    width: float
    backward: Mapping[int, Box]
    #: where backward ends, and where the step begins
    ends: tuple[float, float]

    @property
    def centre(self) -> float:
        return self.x + self.width / 2

    def height(self, time: int) -> float:
        """Where backward is at some time."""
        top, step = self.ends
        if time in self.backward:
            return self.backward[time].y - _ABOVE
        return top - _ABOVE if time >= -1 else step + _ARROW

    @property
    def bar(self) -> Box | None:
        """From where it is issued up to where it is waited for."""
        if not self.travel.reductions:
            return None
        bottom = self.height(self.travel.issued)
        # a bucket that is waited for at once is seen as well
        top = self.ends[1] + _ARROW
        if self.travel.waited >= 0:
            top = min(self.height(self.travel.waited), bottom - 8.0)
        slack = min(8.0, self.width / 5)
        full = "\n".join([*_lines(self.travel), *self.travel.names])
        return Box(self.x + slack / 2, top, self.width - slack, bottom - top, "bucket", full)

    def draw(self, scene: Scene) -> None:
        """The bar, and the way from it to the step."""
        bar, (top, step) = self.bar, self.ends
        if bar is None:
            return
        scene.boxes.append(bar)
        if bar.bottom > top:
            y = max(bar.y, top)
            height = bar.bottom - y
            scene.boxes.append(dataclasses.replace(bar, y=y, height=height, role="hidden"))
        scene.lines.append(Line(((bar.centre, bar.y), (bar.centre, step)), "gradient"))
        self._label(scene, bar)

    def _label(self, scene: Scene, bar: Box) -> None:
        told = _lines(self.travel)
        if self.width >= _WIDE:
            lines = told[: int((bar.height - 6.0) // 14.0)]
            for number, line in enumerate(lines):
                y = bar.bottom - 10.0 - 14.0 * (len(lines) - 1 - number)
                text = Text(bar.centre, y, line, SMALL, number == 0, number > 0, "middle")
                scene.write(text, bar.width - 8.0)
        elif self.width >= _SLIM:
            text = Text(bar.centre + 4.0, bar.bottom - 8.0, told[0], upright=True)
            scene.write(text, bar.height - 16.0)

    def gather(self, scene: Scene, order: Mapping[int, int]) -> None:
        """Lines from the boxes whose backward makes the gradients."""
        bar, x = self.bar, self.centre
        heights = []
        for stage in self.travel.stages:
            box = self.backward.get(stage)
            if box is None:
                continue
            # of a box's gradients those that are made first go first, and leave below
            y = box.middle + box.height * (0.25 - min(0.5, 0.2 * order[stage]))
            heights.append(y)
            end = x if bar is None or y > bar.bottom else bar.x
            line = Line(((box.right, y), (end, y)), "gradient", arrow=False, dot=True)
            scene.lines.append(line)
        upper = self.ends[1] if bar is None else bar.bottom
        if heights and max(heights) > upper:
            stem = ((x, max(heights)), (x, upper))
            full = "\n".join([*_lines(self.travel), *self.travel.names])
            scene.lines.append(Line(stem, "gradient", full, arrow=bar is None))


def _sharing(travels: Sequence[Travel]) -> dict[int, list[int]]:
    """By stage, the travels that take gradients from it."""
    found: dict[int, list[int]] = {}
    for number, travel in enumerate(travels):
        for stage in travel.stages:
            found.setdefault(stage, []).append(number)
    return found


def _lines(travel: Travel) -> list[str]:
    """What is told of a travel."""
    gradients = counted(len(travel.names), "gradient")
    if not travel.reductions:
        return [gradients]
    lines = [mib(travel.bytes), gradients]
    if travel.reductions > 1:
        lines.append(counted(travel.reductions, "all-reduce"))
    return [*lines, travel.dtype] if travel.dtype != "float32" else lines
