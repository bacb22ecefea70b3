# SPDX-License-Identifier: Apache-2.0
"""Nothing overlaps, nothing hangs over, and what flows ends somewhere."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.static.drawing.forms import form_of
from tests.static.nets import captured, net
from tests.static.resnet import captured_resnet50

from fleetlight.static.drawing.around import Heading
from fleetlight.static.drawing.blocks import blocks_of
from fleetlight.static.drawing.layout import laid_out
from fleetlight.static.drawing.scene import Box, Scene, Text
from fleetlight.static.graph.form import Form
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap

NAMES = st.lists(st.sampled_from(["block", "0", "1", "an_unusually_long_name"]), max_size=3)
PATHS = st.lists(NAMES.map(".".join), min_size=1, max_size=45)
SKIPS = st.lists(st.tuples(st.integers(0, 44), st.integers(0, 44)), max_size=12)
BUCKETS = st.lists(st.integers(1, 9), max_size=30)


def scene_of(form: Form) -> Scene:
    heading = Heading("A program", ("a line " * 40, *(f"line {n}" for n in range(12))))
    return laid_out(blocks_of(form), heading)


def check(scene: Scene) -> None:
    solid = [box for box in scene.boxes if box.role != "hidden"]
    for one, other in itertools.combinations(solid, 2):
        assert not overlap(one, other), (one, other)
    for box in [*scene.boxes, *scene.panels]:
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= scene.width
        assert box.bottom <= scene.height
    for box in scene.boxes:
        if box.role == "hidden":
            assert any(within(box, bucket) for bucket in solid if bucket.role == "bucket")
    for line in scene.lines:
        assert all(0 <= x <= scene.width and 0 <= y <= scene.height for x, y in line.points)
        assert any(at_edge(line.points[0], box) for box in solid) or line.role == "gradient"
        if not line.dot:
            assert any(at_edge(line.points[-1], box) for box in solid), line
    for text in scene.texts:
        check_text(text, scene, solid)


def check_text(text: Text, scene: Scene, solid: list[Box]) -> None:
    if text.upright:
        return
    left = text.x - {"start": 0.0, "middle": text.length / 2, "end": text.length}[text.anchor]
    right = left + text.length
    assert left >= 0
    assert right <= scene.width
    for box in solid:
        if box.x <= text.x <= box.right and box.y <= text.y <= box.bottom:
            assert left >= box.x
            assert right <= box.right


def overlap(one: Box, other: Box) -> bool:
    apart = one.right <= other.x or other.right <= one.x
    return not (apart or one.bottom <= other.y or other.bottom <= one.y)


def within(one: Box, other: Box) -> bool:
    across = other.x <= one.x and one.right <= other.right
    return across and other.y <= one.y and one.bottom <= other.bottom + 1e-6


def at_edge(point: tuple[float, float], box: Box) -> bool:
    x, y = point
    inside = box.x - 0.01 <= x <= box.right + 0.01 and box.y - 0.01 <= y <= box.bottom + 0.01
    sides = (x - box.x, x - box.right, y - box.y, y - box.bottom)
    return inside and any(abs(side) < 0.01 for side in sides)


@settings(deadline=None, max_examples=60)
@given(PATHS, SKIPS, BUCKETS)
def test_nothing_overlaps_whatever_the_modules_are(
    paths: list[str], skips: list[tuple[int, int]], buckets: list[int]
) -> None:
    check(scene_of(form_of(paths, skips, buckets)))


@pytest.mark.slow
@pytest.mark.parametrize("is_reduced", [False, True])
def test_real_nets_are_laid_out_well(is_reduced: bool) -> None:
    model = net()
    small = captured(model, torch.optim.Adam(model.parameters()))
    for program in (small, captured_resnet50()):
        passes = (InsertAllReduce(), FuseAllReduce(), Overlap()) if is_reduced else ()
        check(scene_of(program.apply(*passes).form))
        check(scene_of(program.clone(for_test=True).form))


def test_backward_is_level_with_its_forward() -> None:
    scene = scene_of(form_of(["a", "b", "c"]))
    heights = [[box.y for box in scene.boxes if box.role == r] for r in ("forward", "backward")]
    assert heights[0] == heights[1]
    assert heights[0] == sorted(heights[0])


def test_a_bucket_stands_from_where_it_is_issued_to_the_step() -> None:
    scene = scene_of(form_of(list("abcdef"), buckets=[2, 2, 2]))
    backward = [box for box in scene.boxes if box.role == "backward"]
    step = next(box for box in scene.boxes if box.role == "step")
    bars = sorted((box for box in scene.boxes if box.role == "bucket"), key=lambda box: -box.x)
    assert len(bars) == 3
    # the first is issued above `e`, the second above `c`, the last when backward is done
    for bar, number in zip(bars, (4, 2, 0), strict=True):
        assert bar.bottom <= backward[number].y
        assert bar.bottom > backward[number].y - 20
        assert step.bottom < bar.y < backward[0].y
    hidden = [box for box in scene.boxes if box.role == "hidden"]
    assert [box.bottom for box in hidden] == [bar.bottom for bar in reversed(bars[:2])]
