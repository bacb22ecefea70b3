# SPDX-License-Identifier: Apache-2.0
"""What is around a picture: its heading above, and below what the colours are."""

from __future__ import annotations

import dataclasses

from fleetlight.static.drawing.scene import HEADLINE, SMALL, Box, Role, Scene, Text
from fleetlight.static.drawing.words import width

MARGIN = 28.0
_NARROWEST = 480.0
_LINE, _SIZE = 17.0, 12.0
#: more lines are only counted
_MOST = 8
#: above the legend, and between its parts
_ABOVE, _SWATCH, _APART = 32.0, 12.0, 14.0
_LEGEND: dict[Role, str] = {
    "feed": "feeds",
    "table": "rows of tables",
    "forward": "forward",
    "backward": "backward",
    "hidden": "reduced while backward goes on",
    "bucket": "waited for behind it",
    "step": "step",
    "fetch": "can be fetched by name",
}


@dataclasses.dataclass(frozen=True)
class Heading:
    """What stands above a picture."""

    title: str
    lines: tuple[str, ...] = ()

    @property
    def told(self) -> tuple[str, ...]:
        """As many lines as there is room for."""
        more = len(self.lines) - _MOST
        return self.lines if more <= 0 else (*self.lines[:_MOST], f"and {more} more")

    @property
    def bottom(self) -> float:
        """Where it ends."""
        return MARGIN + 14.0 + _LINE * (1 + len(self.told))


def frame(scene: Scene, heading: Heading, bottom: float) -> None:
    """Give a scene its heading, its legend and its size, below `bottom` at least."""
    things = [*scene.boxes, *scene.panels]
    scene.width = max(_NARROWEST, MARGIN + max((box.right for box in things), default=0.0))
    room = scene.width - 2 * MARGIN
    title = Text(MARGIN, MARGIN + 8.0, heading.title, HEADLINE, bold=True, muted=False)
    scene.write(title, room)
    for number, line in enumerate(heading.told):
        y = MARGIN + 10.0 + _LINE * (1 + number)
        scene.write(Text(MARGIN, y, line, _SIZE), room)
    end = max((box.bottom for box in things), default=bottom)
    scene.height = _legend(scene, end + _ABOVE) + MARGIN / 2


def _legend(scene: Scene, y: float) -> float:
    """What the colours are, of those that there are; answers where it ends."""
    there, x = {box.role for box in scene.boxes}, MARGIN
    for role, text in _LEGEND.items():
        if role not in there:
            continue
        wide = _SWATCH + 6.0 + width(text, SMALL)
        if x + wide > scene.width - MARGIN and x > MARGIN:
            x, y = MARGIN, y + _LINE + 3.0
        scene.panels.append(Box(x, y, _SWATCH, _SWATCH, role, text))
        scene.texts.append(Text(x + _SWATCH + 6.0, y + 10.0, text))
        x += wide + _APART
    return y + _SWATCH
