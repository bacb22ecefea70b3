# SPDX-License-Identifier: Apache-2.0
"""Pictures without Graphviz: all boxes apart from each other, and text that stays text."""

import itertools
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.static.drawing.forms import form_of
from tests.static.drawing.test_picture import picture_with, readable
from tests.static.nets import captured, net

from fleetlight.static.drawing.picture import Picture, PictureArrow, PictureBox, picture_of
from fleetlight.static.drawing.svg import svg_of

NAMESPACE = "{http://www.w3.org/2000/svg}"
#: with a frame, arrows past other boxes, and two buckets
REDUCED = form_of(["m.0", "m.1", "c", "d", "e"], [(0, 3), (1, 4)], [2, 3])
Rectangle = tuple[float, float, float, float]
TABLES = Picture(
    "rows",
    (),
    (
        PictureBox("x0", "feed", ("ids",)),
        PictureBox("x1", "feed", ("labels",)),
        PictureBox("t0", "table", ("pull rows",)),
        PictureBox("f0", "forward", ("mlp",)),
        PictureBox("f1", "loss", ("loss",)),
    ),
    (
        PictureArrow("x0", "t0"),
        PictureArrow("t0", "f0"),
        PictureArrow("x1", "f1"),
        PictureArrow("f0", "f1", "batch"),
    ),
    (),
    (),
)


def boxes_of(text: str) -> dict[str, Rectangle]:
    """The rectangle of each box by its first line."""
    found = {}
    for group in ElementTree.fromstring(text).iter(f"{NAMESPACE}g"):
        rect, title = group.find(f"{NAMESPACE}rect"), group.find(f"{NAMESPACE}text")
        assert rect is not None
        assert title is not None
        x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        found[str(title.text)] = (x, y, x + width, y + height)
    return found


def overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.slow
def test_boxes_are_apart_and_inside_the_drawing() -> None:
    model = net()
    plain = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for picture in (plain.draw().picture, picture_of(REDUCED), TABLES):
        text = svg_of(picture)
        assert text == svg_of(picture)
        boxes = boxes_of(text)
        assert len(boxes) == len({box.lines[0] for box in picture.boxes})
        root = ElementTree.fromstring(text)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        assert all(x >= 0 and y >= 0 and r < width and b < height for x, y, r, b in boxes.values())
        assert not any(overlap(*pair) for pair in itertools.combinations(boxes.values(), 2))
        tips = [path for path in root.iter(f"{NAMESPACE}path") if "marker-end" in path.attrib]
        assert len(tips) == len(picture.arrows)


def test_forward_goes_down_with_backward_beside_it() -> None:
    boxes = boxes_of(svg_of(picture_of(REDUCED)))
    names = ("m.0", "m.1", "2", "3", "4")
    heights = [boxes[name][1] for name in names]
    assert heights == sorted(set(heights))
    for name in names:
        assert boxes[f"∂ {name}"][0] > boxes[name][2]
        assert boxes[f"∂ {name}"][1] == boxes[name][1]
    assert boxes["optimizer's step"][1] == boxes["m.0"][1]
    bucket = boxes["2 gradients · 48 B · float32"]
    assert (bucket[0] > boxes["∂ 3"][2], bucket[1]) == (True, boxes["∂ 3"][1])


def test_inputs_are_beside_the_level_that_reads_them() -> None:
    boxes = boxes_of(svg_of(TABLES))
    assert boxes["ids"][1] == boxes["mlp"][1], "the ids are read by the table of the first level"
    assert boxes["ids"][3] < boxes["pull rows"][1] < boxes["labels"][1]
    assert boxes["labels"][1] == boxes["loss"][1]


@given(
    st.text(min_size=1, max_size=50)
    | st.sampled_from(['a "b"', "</text><script>alert(1)</script>", "]]>", "層.0", "&amp;"])
)
def test_every_name_stays_text(name: str) -> None:
    root = ElementTree.fromstring(svg_of(picture_with(name)))
    texts = [element.text for element in root.iter() if element.text]
    # XML reads every end of a line as one
    assert sum(readable(name).strip() in (text or "") for text in texts) >= 3
    tags = {element.tag.removeprefix(NAMESPACE) for element in root.iter()}
    assert tags <= {"svg", "title", "defs", "marker", "path", "rect", "text", "g"}
    names = {key for element in root.iter() for key in element.attrib}
    assert not [key for key in names if key.startswith("on") or key.endswith("href")]
