# SPDX-License-Identifier: Apache-2.0
"""A chart of some curves as SVG, for result pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 230.0, 44.0, 50.0
#: colours that are distinct also with colour blindness; the eighth is black
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#7a5cc7", "#333333"),
)
_FONT = 'font-family="system-ui,\'DejaVu Sans\',sans-serif" font-size="12"'


def chart(title: str, across: str, up: str, curves: Mapping[str, Points]) -> str:
    """The text of an SVG file with the curves and their names."""
    points = [point for curve in curves.values() for point in curve]
    box = _Box([x for x, _ in points], [y for _, y in points])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{HEIGHT:g}" '
        f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" {_FONT}>',
        f'<rect width="{WIDTH:g}" height="{HEIGHT:g}" fill="#ffffff"/>',
        _text(LEFT, 24, title, size=14),
        *box.axes(across, up),
        *(
            part
            for number, (name, curve) in enumerate(curves.items())
            for part in _curve(box, number, name, curve)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Box:
    """Maps values to points of the chart."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x_marks, self.y_marks = marks(min(xs), max(xs)), marks(min(ys), max(ys))
        self._x = min(*xs, self.x_marks[0]), max(*xs, self.x_marks[-1])
        self._y = min(*ys, self.y_marks[0]), max(*ys, self.y_marks[-1])

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The point of a value."""
        across, up = _part(x, *self._x), _part(y, *self._y)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    def axes(self, across: str, up: str) -> Iterator[str]:
        """Ticks with their values, grid lines, and labels."""
        for mark in self.y_marks:
            _, y = self.at(0, mark)
            yield _line((LEFT, y), (WIDTH - RIGHT, y))
            yield _text(LEFT - 8, y + 4, f"{mark:g}", anchor="end")
        for mark in self.x_marks:
            x, _ = self.at(mark, 0)
            yield _text(x, HEIGHT - BOTTOM + 18, f"{mark:g}", anchor="middle")
        yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, across, anchor="middle")
        yield _text(LEFT - 44, TOP - 8, up)


def marks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that span the values."""
    span = (high - low) or 1.0
    power: float = 10 ** math.floor(math.log10(span / count))
    step = next(power * of for of in (1, 2, 5, 10) if span / (power * of) <= count)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _part(value: float, low: float, high: float) -> float:
    return (value - low) / ((high - low) or 1.0)


def _curve(box: _Box, number: int, name: str, curve: Points) -> Iterator[str]:
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (box.at(*point) for point in curve))
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    x, y = WIDTH - RIGHT + 16, TOP + 20 * number
    yield _line((x, y), (x + 22, y), f'"{colour}" stroke-width="3"')
    yield _text(x + 28, y + 4, name)


def _line(start: tuple[float, float], end: tuple[float, float], stroke: str = '"#dddddd"') -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke={stroke}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {where} fill="#333333">{escape(text)}</text>'
