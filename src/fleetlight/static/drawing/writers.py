# SPDX-License-Identifier: Apache-2.0
"""A picture as text: DOT for Graphviz, and Mermaid for web pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fleetlight.static.drawing.picture import Flow, Kind, Picture, PictureBox

#: fill and border
COLOURS: dict[Kind, tuple[str, str]] = {
    "feed": ("#eef1f4", "#8b98a5"),
    "table": ("#e3f4ee", "#3d9b7c"),
    "forward": ("#e7f0fd", "#4a86d8"),
    "loss": ("#fdeaea", "#d2575a"),
    "backward": ("#fdf1e2", "#dd9238"),
    "overlapped": ("#e2f3e4", "#4c9a57"),
    "bucket": ("#f9e1f0", "#b8518f"),
    "step": ("#efe8fb", "#8a66c9"),
}
_STYLES: dict[Flow, str] = {"value": "solid", "kept": "dotted", "gradient": "bold"}
_ARROWS: dict[Flow, str] = {"value": "-->", "kept": "-.->", "gradient": "==>"}
#: longer titles are cut; the tooltip has the whole title
_MAX_TITLE_LENGTH = 60
_UNWRITABLE = re.compile(
    "[^\\t\\x20-\\x7e\\xa0-\\u2027\\u202a-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]"
)
#: characters that HTML or Markdown may interpret; an underscore inside a word is plain
_SPECIAL = re.compile(r"[^\w\s.,:·×∂…()/=+>-]|(?<!\w)_|_(?!\w)")


def dot_of(picture: Picture) -> str:
    """DOT text: the forward goes down, and backward goes up beside it, to the step."""
    return "\n".join(["digraph program {", *(f"  {line}" for line in _dot(picture)), "}", ""])


def _dot(picture: Picture) -> Iterator[str]:
    # each line of the label is aligned to the left
    heading = "".join(f"{_quoted(line)}\\l" for line in (picture.title, *picture.lines))
    yield f'graph [label="{heading}", labelloc=t, labeljust=l, fontname=Helvetica, nodesep=0.4];'
    yield 'node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=11];'
    yield "edge [fontname=Helvetica, fontsize=9, arrowsize=0.7];"
    upward = set()
    for box in picture.boxes:
        fill, border = COLOURS[box.kind]
        label = "\\n".join(_quoted(shortened(line)) for line in box.lines)
        tip = "\\n".join(map(_quoted, full_of(box).split("\n")))
        colours = f'fillcolor="{fill}", color="{border}"'
        yield f'{box.name} [label="{label}", tooltip="{tip}", {colours}];'
        if box.name[0] in "br":
            upward.add(box.name)
    framed: set[str] = set()
    for number, frame in enumerate(picture.frames):
        framed.update(frame.members)
        yield f'subgraph cluster_{number} {{ label="{_quoted(frame.title)}"; style=rounded;'
        yield f"  {'; '.join(frame.members)};"
        # Graphviz moves nodes out of a cluster if a rank outside of it lists them
        yield from (
            f"  {_side_by_side(pair)}" for pair in picture.beside if pair[0] in frame.members
        )
        yield "}"
    yield from (_side_by_side(pair) for pair in picture.beside if pair[0] not in framed)
    for arrow in picture.arrows:
        style = f'label="{_quoted(arrow.label)}", style={_STYLES[arrow.flow]}'
        # Graphviz places the source of an edge above its target
        if arrow.source in upward:
            yield f"{arrow.target} -> {arrow.source} [{style}, dir=back];"
        else:
            yield f"{arrow.source} -> {arrow.target} [{style}];"


def _side_by_side(names: Iterable[str]) -> str:
    return f"{{ rank=same; {'; '.join(names)}; }}"


def mermaid_of(picture: Picture) -> str:
    """Mermaid text: the forward, backward and the step go down."""
    return "\n".join(["flowchart TB", *(f"  {line}" for line in _mermaid(picture)), ""])


def _mermaid(picture: Picture) -> Iterator[str]:
    heading = "<br/>".join(map(_entities, (picture.title, *picture.lines)))
    yield f'heading["{heading}"]'
    for box in picture.boxes:
        label = "<br/>".join(_entities(shortened(line)) for line in box.lines)
        yield f'{box.name}["{label}"]:::{box.kind}'
    for number, frame in enumerate(picture.frames):
        yield f'subgraph g{number}["{_entities(frame.title)}"]'
        yield from (f"  {member}" for member in frame.members)
        yield "end"
    for arrow in picture.arrows:
        label = f'|"{_entities(arrow.label)}"|' if arrow.label else ""
        yield f"{arrow.source} {_ARROWS[arrow.flow]}{label} {arrow.target}"
    for kind, (fill, border) in COLOURS.items():
        yield f"classDef {kind} fill:{fill},stroke:{border},color:#1c2329"


def shortened(line: str) -> str:
    """A line of a box; the tooltip has all of it."""
    return line if len(line) <= _MAX_TITLE_LENGTH else f"{line[: _MAX_TITLE_LENGTH - 1]}…"


def full_of(box: PictureBox) -> str:
    """The tooltip, with the title first."""
    title = box.lines[0]
    return box.full if box.full.startswith(title) else f"{title}\n{box.full}"


def writable(text: str) -> str:
    """The text, with a mark for each character that XML does not allow."""
    return _UNWRITABLE.sub("\ufffd", text)


def _quoted(text: str) -> str:
    """Escape a quoted string of DOT, whose labels also have HTML's entities."""
    text = writable(text).replace("&", "&amp;")
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _entities(text: str) -> str:
    """Escape a quoted string of Mermaid, which may have HTML and Markdown."""
    plain = writable(text)
    return _SPECIAL.sub(lambda found: f"#{ord(found[0])};", plain)
