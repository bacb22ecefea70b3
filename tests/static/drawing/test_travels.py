# SPDX-License-Identifier: Apache-2.0
"""Gradients: where they come from, when they are reduced, and when they are waited for."""

from __future__ import annotations

from tests.static.drawing.forms import VALUE, form_of
from tests.static.resnet import captured_resnet50

from fleetlight.static.drawing.blocks import blocks_of
from fleetlight.static.drawing.travels import BEHIND
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap

SIZE = VALUE.numel() * VALUE.element_size()


def test_gradients_that_nobody_reduces_travel_together() -> None:
    (travel,) = blocks_of(form_of(["a", "b"])).travels
    assert (travel.names, travel.stages, travel.reductions) == (("1.weight", "0.weight"), (0, 1), 0)


def test_buckets_say_what_they_hold_and_when_they_travel() -> None:
    one, other, rest = blocks_of(form_of(list("abcd"), buckets=[1, 2])).travels
    assert (one.names, one.stages, one.issued, one.waited) == (("3.weight",), (3,), 3, BEHIND)
    assert (other.names, other.issued) == (("1.weight", "2.weight"), 1)
    assert (rest.names, rest.reductions) == (("0.weight",), 0)
    assert one.bytes == SIZE
    assert one.dtype == "float32"


def test_reductions_at_the_same_heights_are_one_bar() -> None:
    form = captured_resnet50().apply(InsertAllReduce()).form
    (travel,) = blocks_of(form).travels
    assert (travel.reductions, len(travel.names)) == (161, 161)
    assert (travel.issued, travel.waited) == (BEHIND, BEHIND)


def test_resnet50_has_5_buckets_of_which_4_travel_while_backward_goes_on() -> None:
    program = captured_resnet50().apply(InsertAllReduce(), FuseAllReduce(), Overlap())
    blocks = blocks_of(program.form)
    assert len(blocks.stages) == 24
    assert blocks.tensors == 161
    assert [travel.reductions for travel in blocks.travels] == [1] * 5
    assert sum(len(travel.names) for travel in blocks.travels) == 161
    assert sum(travel.bytes for travel in blocks.travels) == blocks.bytes
    issued = [travel.issued for travel in blocks.travels]
    assert issued == sorted(issued, reverse=True)
    assert [travel.issued >= 0 for travel in blocks.travels] == [True] * 4 + [False]
    assert {travel.waited for travel in blocks.travels} == {BEHIND}
    assert sum(stage.gradients for stage in blocks.stages) == 161
