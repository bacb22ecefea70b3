# SPDX-License-Identifier: Apache-2.0
"""Drawings as SVG, in light and dark colours. Pure."""

from __future__ import annotations

from xml.sax.saxutils import escape

#: distinct also with colour blindness, and on a light and a dark page
COLOURS = ("#3b7dd8", "#e0722a", "#1f9d7a", "#b8609c", "#b58900", "#7a68c8")
_LIGHT = "--ink:#222;--soft:#555;--line:#bbb;--paper:#fff;--fill:#f0f2f6"
_DARK = "--ink:#ddd;--soft:#aaa;--line:#555;--paper:#1e2129;--fill:#2a2e38"
_STYLE = (
    f"svg.drawing{{{_LIGHT};max-width:640px;font:13px system-ui,'DejaVu Sans',sans-serif}}"
    f"@media(prefers-color-scheme:dark){{svg.drawing{{{_DARK}}}}}"
    ".drawing .ink{fill:var(--ink)}.drawing .soft{fill:var(--soft);font-size:12px}"
    ".drawing .line{stroke:var(--line);fill:none}"
    ".drawing .arrow{stroke:var(--soft);fill:none;stroke-width:1.4}"
    ".drawing .tip{fill:var(--soft)}.drawing .box{fill:var(--fill);stroke:var(--line)}"
    ".drawing .on{fill:#fff}"
)
#: half the width and the length of an arrow's tip
_HALF, _LENGTH = 3.5, 8.0


class Drawing:
    """Shapes and texts, from the top left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" '
            f'viewBox="0 0 {width:g} {height:g}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
        ]

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"

    def text(self, x: float, y: float, text: str, kind: str = "ink", at: str = "start") -> None:
        """A text whose baseline is at y; `at`: start, middle or end."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{at}">{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", colour: str = ""
    ) -> None:
        """A rectangle with a text in its middle."""
        look = f'fill="{colour}"' if colour else 'class="box"'
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
            f'rx="3" {look}/>'
        )
        if text:
            kind = "on" if colour else "ink"
            self.text(x + width / 2, y + height / 2 + 4.5, text, kind, "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "") -> None:
        """A line."""
        look = f'stroke="{colour}" stroke-width="2.2"' if colour else 'class="line"'
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {look}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a tip at its end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - ux * _LENGTH, y2 - uy * _LENGTH
        corners = (
            (x2, y2),
            (bx - uy * _HALF, by + ux * _HALF),
            (bx + uy * _HALF, by - ux * _HALF),
        )
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{bx:.1f}" y2="{by:.1f}" class="arrow"/>'
            f'<polygon points="{points}" class="tip"/>'
        )

    def curve(self, points: list[tuple[float, float]], colour: str, *, dots: bool = True) -> None:
        """A line through points, with a dot at each unless there are many."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>'
        )
        self._parts += dots * [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points
        ]
