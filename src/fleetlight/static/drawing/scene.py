# SPDX-License-Identifier: Apache-2.0
"""What stands where in a picture: boxes, texts and lines, before they become SVG."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fleetlight.static.drawing.words import fitted, width

#: what things are, and so what colours they have
Role = Literal[
    "feed", "table", "fetch", "forward", "backward", "loss", "bucket", "hidden", "step", "group"
]
Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]
#: sizes of texts
HEADLINE, TITLE, SMALL = 19.0, 13.0, 11.0
#: between a box and its text
PAD = 12.0


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle; `full` is told to who points at it."""

    x: float
    y: float
    width: float
    height: float
    role: Role
    full: str = ""

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.y + self.height

    @property
    def centre(self) -> float:
        """From the left."""
        return self.x + self.width / 2

    @property
    def middle(self) -> float:
        """From the top."""
        return self.y + self.height / 2


@dataclasses.dataclass(frozen=True)
class Text:
    """One line of text, `y` being where its letters stand."""

    x: float
    y: float
    content: str
    size: float = SMALL
    bold: bool = False
    muted: bool = True
    anchor: Anchor = "start"
    #: read from the bottom up
    upright: bool = False
    #: the whole, where it was shortened
    full: str = ""

    @property
    def length(self) -> float:
        """As long as it is at most."""
        return width(self.content, self.size, self.bold)


@dataclasses.dataclass(frozen=True)
class Line:
    """From point to point, round at the corners."""

    points: tuple[Point, ...]
    role: Literal["value", "kept", "gradient"]
    full: str = ""
    arrow: bool = True
    dot: bool = False


@dataclasses.dataclass
class Scene:
    """All of it; later things are in front of earlier ones, boxes in front of lines."""

    width: float = 0.0
    height: float = 0.0
    panels: list[Box] = dataclasses.field(default_factory=list)
    lines: list[Line] = dataclasses.field(default_factory=list)
    boxes: list[Box] = dataclasses.field(default_factory=list)
    texts: list[Text] = dataclasses.field(default_factory=list)

    def write(self, text: Text, room: float, ends: bool = False) -> None:
        """A text that is shortened where there is no room for it."""
        content = fitted(text.content, room, text.size, text.bold, ends)
        if content:
            full = text.full or (text.content if content != text.content else "")
            self.texts.append(dataclasses.replace(text, content=content, full=full))

    def line_of_two(self, box: Box, y: float, left: Text, right: str, ends: bool = False) -> None:
        """A text at the left of a box, which takes most where both are long, and one at its right.

        `ends`: of a long one at the left the end is shown.
        """
        room = box.width - 2 * PAD
        most = room - PAD - min(width(right, SMALL), 0.35 * room) if right else room
        shown = fitted(left.content, most, left.size, left.bold, ends)
        self.write(dataclasses.replace(left, x=box.x + PAD, y=y), most, ends)
        rest = room - (width(shown, left.size, left.bold) + PAD if shown else 0.0)
        self.write(Text(box.right - PAD, y, right, anchor="end"), rest)
