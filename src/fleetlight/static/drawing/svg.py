# SPDX-License-Identifier: Apache-2.0
"""A scene as SVG: shapes, texts, and colours for light and dark surroundings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from fleetlight.static.drawing.scene import Box, Line, Point, Scene, Text

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif"
#: fill and border, light and dark
_COLOURS = {
    "feed": ("#f3f4f6", "#c6cad2", "#23272f", "#4a515e"),
    "fetch": ("#f3f4f6", "#c6cad2", "#23272f", "#4a515e"),
    "table": ("#e6f4f1", "#7dbfb0", "#15302c", "#3c7d70"),
    "forward": ("#eaf1fb", "#9dbce6", "#1b2a40", "#44699c"),
    "backward": ("#fdf2e4", "#e6bd85", "#3a2c18", "#94703a"),
    "loss": ("#f9e9ee", "#dda0b3", "#3b2029", "#94586b"),
    "bucket": ("#eef7ee", "#a5cfa5", "#1a2b1c", "#4f8653"),
    "hidden": ("#c6e5c7", "#a5cfa5", "#2c5231", "#4f8653"),
    "step": ("#f0ebfa", "#b9a5e0", "#2a2340", "#6d5ba0"),
    "group": ("#f4f6f9", "#e6e9ef", "#191c23", "#262b35"),
}
#: background, text, quiet text, lines, lines of gradients
_PAPER = {
    "light": ("#ffffff", "#1f2430", "#667085", "#98a1b0", "#8dbb8f"),
    "dark": ("#111318", "#e8eaee", "#98a1b0", "#69727f", "#55895a"),
}
_ROUND, _CORNER = 7.0, 6.0
_HEAD = 6.0


def svg_of(scene: Scene) -> str:
    """The text of an SVG file."""
    size = f'width="{_n(scene.width)}" height="{_n(scene.height)}"'
    box = f'viewBox="0 0 {_n(scene.width)} {_n(scene.height)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fleetlight" {size} {box} role="img">',
        f"<style>{_style()}</style>",
        f'<rect class="paper" {size} rx="10"/>',
        *map(_box, scene.panels),
        *(part for line in scene.lines for part in _line(line)),
        *map(_box, scene.boxes),
        *map(_text, scene.texts),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    dark = "".join(_rules(dark=True))
    return "".join(_rules(dark=False)) + f"@media (prefers-color-scheme:dark){{{dark}}}"


def _rules(dark: bool) -> Iterator[str]:
    paper, ink, quiet, line, gradient = _PAPER["dark" if dark else "light"]
    own = ".fleetlight "
    if not dark:
        yield f"{own}text{{font-family:{_FONT};pointer-events:none}}"
        yield f"{own}.whole{{pointer-events:auto}}"
        yield f"{own}path{{fill:none;stroke-width:1.3}}"
        yield f"{own}.kept{{stroke-dasharray:1.5 4}}"
        yield f"{own}.bold{{font-weight:600}}"
        yield f"{own}.hidden{{stroke:none}}"
        yield f"{own}.group{{stroke-width:1}}{own}.fetch{{stroke-dasharray:3 2}}"
    yield f"{own}.paper{{fill:{paper}}}"
    yield f"{own}text{{fill:{ink}}}{own}.quiet{{fill:{quiet}}}"
    yield f"{own}.value,{own}.kept{{stroke:{line}}}{own}.tip{{fill:{line};stroke:none}}"
    yield f"{own}.gradient{{stroke:{gradient}}}{own}.drop{{fill:{gradient};stroke:none}}"
    for role, colours in _COLOURS.items():
        fill, border = colours[2:] if dark else colours[:2]
        border = "" if role == "hidden" else f";stroke:{border}"
        yield f"{own}.{role}{{fill:{fill}{border}}}"


def _box(box: Box) -> str:
    place = f'x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}"'
    round_ = min(_ROUND, box.height / 2, box.width / 4)
    shape = f'<rect class="{box.role}" {place} rx="{_n(round_)}"'
    return f"{shape}>{_told(box.full)}</rect>" if box.full else f"{shape}/>"


def _told(text: str) -> str:
    return f"<title>{_plain(text)}</title>"


def _text(text: Text) -> str:
    x, y = _n(text.x), _n(text.y)
    kinds = {"bold": text.bold, "quiet": text.muted, "whole": text.full}
    names = " ".join(name for name, has in kinds.items() if has)
    of = f' class="{names}"' if names else ""
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    turned = f' transform="rotate(-90 {x} {y})"' if text.upright else ""
    start = f'<text x="{x}" y="{y}" font-size="{_n(text.size)}"{of}{anchor}{turned}>'
    return f"{start}{_plain(text.content)}{_told(text.full) if text.full else ''}</text>"


def _plain(text: str) -> str:
    """Without what XML has other uses for, or cannot have at all."""
    return escape("".join(letter if _is_writable(letter) else "\ufffd" for letter in text))


def _is_writable(letter: str) -> bool:
    """No control character, and no half of what takes two."""
    is_half = "\ud800" <= letter <= "\udfff"
    return letter in "\n\t" or (letter >= " " and not is_half and letter not in "\ufffe\uffff")


def _line(line: Line) -> Iterator[str]:
    points = list(line.points)
    if line.arrow:
        # the line ends where the head begins
        points[-1] = _before(points[-1], points[-2], _HEAD - 1.0)
    told = _told(line.full) if line.full else ""
    yield f'<path class="{line.role}" d="{_way(points)}">{told}</path>'
    tone = "drop" if line.role == "gradient" else "tip"
    if line.arrow:
        yield f'<path class="{tone}" d="{_head(line.points[-1], line.points[-2])}"/>'
    if line.dot:
        (x, y) = line.points[-1]
        yield f'<circle class="{tone}" cx="{_n(x)}" cy="{_n(y)}" r="2.5"/>'


def _way(points: Sequence[Point]) -> str:
    """Straight lines with round corners."""
    parts = [f"M{_at(points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        size = min(_CORNER, math.dist(before, corner) / 2, math.dist(corner, after) / 2)
        start, end = _before(corner, before, size), _before(corner, after, size)
        parts.append(f"L{_at(start)}Q{_at(corner)} {_at(end)}")
    return "".join([*parts, f"L{_at(points[-1])}"])


def _before(point: Point, other: Point, by: float) -> Point:
    """A point that is nearer to another."""
    length = math.dist(point, other) or 1.0
    part = min(1.0, by / length)
    return point[0] + (other[0] - point[0]) * part, point[1] + (other[1] - point[1]) * part


def _head(tip: Point, other: Point) -> str:
    x, y = _before(tip, other, _HEAD)
    length = math.dist(tip, other) or 1.0
    across = ((tip[1] - other[1]) / length * 3.2, (other[0] - tip[0]) / length * 3.2)
    corners = [tip, (x + across[0], y + across[1]), (x - across[0], y - across[1])]
    return f"M{'L'.join(map(_at, corners))}Z"


def _at(point: Point) -> str:
    return f"{_n(point[0])} {_n(point[1])}"


def _n(number: float) -> str:
    """At most one digit behind the point."""
    return f"{number:.1f}".removesuffix(".0")
