# SPDX-License-Identifier: Apache-2.0
"""A picture as SVG without Graphviz: a row for each level, and a column for each kind of box.

It has shapes and text only: no script, no style sheet and no address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from xml.sax.saxutils import escape

from fleetlight.static.drawing.picture import Picture, PictureArrow, PictureBox, PictureFrame
from fleetlight.static.drawing.writers import COLOURS, full_of, shortened, writable

#: the width of a letter, the height of a line, and the space inside a box
_LETTER, _LINE, _INSIDE = 6.4, 15.0, 10.0
#: between the boxes of a column, between columns, and around everything
_GAP, _BETWEEN, _MARGIN = 30.0, 90.0, 20.0
#: how far an arrow past other boxes bends aside, at most
_BEND = 70.0
#: by the first letter of a box: inputs, forward, backward beside it, buckets, steps
_COLUMNS = {"x": 0, "t": 0, "f": 1, "b": 2, "r": 3, "s": 4}
_DASHES = {"value": "", "kept": ' stroke-dasharray="2 3"', "gradient": ' stroke-width="2"'}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a box is."""

    column: int
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def svg_of(picture: Picture) -> str:
    """SVG text: the forward goes down, and backward goes up beside it, to the step."""
    heading = [picture.title, *picture.lines]
    places = _placed(picture, _MARGIN + (len(heading) + 1) * _LINE)
    frames = [_framed(frame, places) for frame in picture.frames]
    right = max((p.x + p.width for p in places.values()), default=0.0)
    width = max(right, *(len(line) * _LETTER for line in heading)) + _BEND + _MARGIN
    height = max((p.y + p.height for p in places.values()), default=0.0) + 2 * _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        f"<title>{_text(picture.title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 8,4 0,8z" fill="#444"/></marker></defs>',
        *(_written(_MARGIN, _MARGIN + n * _LINE, line, "start") for n, line in enumerate(heading)),
        *frames,
        *(line for arrow in picture.arrows for line in _arrow(arrow, places)),
        *(line for box in picture.boxes for line in _box(box, places[box.name])),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _placed(picture: Picture, top: float) -> dict[str, _Place]:
    """The place of each box, row by row."""
    rows = _rows(picture)
    size = {box.name: _size(box) for box in picture.boxes}
    widths = [0.0] * (max(_COLUMNS.values()) + 1)
    for name, (width, _) in size.items():
        widths[_COLUMNS[name[0]]] = max(widths[_COLUMNS[name[0]]], width)
    starts, x = [], _MARGIN
    for width in widths:
        starts.append(x)
        x += width + _BETWEEN if width else 0.0
    framed = {frame.members[0] for frame in picture.frames}
    places: dict[str, _Place] = {}
    for row in rows:
        # the title of a frame is above its first row
        top += _LINE if framed & set(row) else 0.0
        ends = [top] * len(widths)
        for name in row:
            column = _COLUMNS[name[0]]
            _, height = size[name]
            places[name] = _Place(column, starts[column], ends[column], widths[column], height)
            ends[column] += height + _GAP
        top = max(ends)
    return places


def _rows(picture: Picture) -> list[list[str]]:
    """The names of the boxes in each row: a level of the model, and what is nearest to it."""
    levels = max((int(b.name[1:]) for b in picture.boxes if b.name[0] in "fb"), default=0) + 1
    rows: list[list[str]] = [[] for _ in range(levels)]
    near: dict[str, list[int]] = {}
    for arrow in picture.arrows:
        for name, other in ((arrow.source, arrow.target), (arrow.target, arrow.source)):
            if other[0] in "fb":
                near.setdefault(name, []).append(int(other[1:]))
    for arrow in picture.arrows:
        if arrow.source not in near and arrow.target in near:
            # a feed that only a table reads is above the table
            near[arrow.source] = [min(near[arrow.target])]
    for box in picture.boxes:
        if box.name[0] in "fb":
            rows[int(box.name[1:])].append(box.name)
        elif box.name[0] == "s":
            rows[0].append(box.name)
    for box in sorted(picture.boxes, key=lambda box: box.name[0] != "x"):
        if box.name[0] in "xtr":
            rows[min(near.get(box.name, [0]))].append(box.name)
    return rows


def _size(box: PictureBox) -> tuple[float, float]:
    longest = max(len(shortened(line)) for line in box.lines)
    return longest * _LETTER + 2 * _INSIDE, len(box.lines) * _LINE + _INSIDE


def _box(box: PictureBox, at: _Place) -> Iterator[str]:
    fill, border = COLOURS[box.kind]
    yield f"<g><title>{_text(full_of(box))}</title>"
    yield (
        f'<rect x="{at.x:.1f}" y="{at.y:.1f}" width="{at.width:.1f}" height="{at.height:.1f}" '
        f'rx="6" fill="{fill}" stroke="{border}"/>'
    )
    for number, line in enumerate(box.lines):
        yield _written(at.middle[0], at.y + (number + 1) * _LINE, shortened(line), "middle")
    yield "</g>"


def _framed(frame: PictureFrame, places: Mapping[str, _Place]) -> str:
    members = [places[name] for name in frame.members]
    left, top = min(p.x for p in members) - _INSIDE, min(p.y for p in members) - _LINE - 4
    right = max(p.x + p.width for p in members) + _INSIDE
    bottom = max(p.y + p.height for p in members) + 6
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
        f'height="{bottom - top:.1f}" rx="8" fill="none" stroke="#aaa"/>'
        + _written(left + 6, top + 12, frame.title, "start")
    )


def _arrow(arrow: PictureArrow, places: Mapping[str, _Place]) -> Iterator[str]:
    start, end = places[arrow.source], places[arrow.target]
    path, (x, y) = _route(start, end, places.values())
    yield (
        f'<path d="{path}" fill="none" stroke="#444"{_DASHES[arrow.flow]} marker-end="url(#tip)"/>'
    )
    if arrow.label:
        yield _written(
            x, y, arrow.label, "start" if x > start.middle[0] == end.middle[0] else "middle", 9
        )


def _route(
    start: _Place, end: _Place, others: Collection[_Place]
) -> tuple[str, tuple[float, float]]:
    """The path of an arrow, and the place of its label."""
    (x1, y1), (x2, y2) = start.middle, end.middle
    if start.column != end.column:
        x1, x2 = (start.x + start.width, end.x) if x1 < x2 else (start.x, end.x + end.width)
        # boxes of one row have a straight arrow
        y1 = y2 if start.y <= y2 <= start.y + start.height else y1
        half = (x1 + x2) / 2
        return f"M{x1:.1f},{y1:.1f} C{half:.1f},{y1:.1f} {half:.1f},{y2:.1f} {x2:.1f},{y2:.1f}", (
            half,
            (y1 + y2) / 2 - 4,
        )
    low, high = sorted((y1, y2))
    between = sum(p.column == start.column and low < p.middle[1] < high for p in others)
    if not between:
        down = y2 > y1
        y1, y2 = (start.y + start.height, end.y) if down else (start.y, end.y + end.height)
        return f"M{x1:.1f},{y1:.1f} V{y2:.1f}", (x1 + 6, (y1 + y2) / 2 + 3)
    # past the boxes between them: the forward on the left, the rest on the right
    side, bend = (-1, start.x) if start.column < 2 else (1, start.x + start.width)
    far = bend + side * min(_BEND, 20.0 + 8.0 * between)
    path = f"M{bend:.1f},{y1:.1f} C{far:.1f},{y1:.1f} {far:.1f},{y2:.1f} {bend:.1f},{y2:.1f}"
    return path, (far, (y1 + y2) / 2)


def _written(x: float, y: float, text: str, anchor: str, size: int = 0) -> str:
    small = f' font-size="{size}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{small}>{_text(text)}</text>'


def _text(text: str) -> str:
    return escape(writable(text))
