# SPDX-License-Identifier: Apache-2.0
"""What is shown of a program, before anything has a place."""

from __future__ import annotations

import torch
from tests.static.drawing.forms import form_of
from tests.static.nets import captured, net
from tests.static.table_nets import Fields, written
from torch import nn

from fleetlight import static
from fleetlight.static.drawing.blocks import Blocks, blocks_of
from fleetlight.static.passes.split_ps import SplitPS


def blocks(program: static.Program, kinds: dict[str, str] | None = None) -> Blocks:
    return blocks_of(program.form, kinds, "SGD")


def made() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_modules_are_stages_with_what_they_hold() -> None:
    found = blocks(made(), {"0": "Linear"})
    assert [stage.forward.title for stage in found.stages] == ["0", "1", "2", "3", "4", "loss"]
    first = found.stages[0]
    assert (first.forward.kind, first.parameters, first.bytes) == ("Linear", 108, 864)
    assert [stage.gradients for stage in found.stages] == [2, 2, 0, 0, 2, 0]
    assert all(stage.backward for stage in found.stages)
    assert found.stages[4].fetches == ("output",)
    assert found.stages[5].fetches == ("loss", "accuracy")
    assert found.parameters == sum(stage.parameters for stage in found.stages)


def test_what_flows_has_its_shape() -> None:
    found = blocks(made())
    before = len(found.entries)
    wires = {(w.source - before, w.target - before): w.label for w in found.forward}
    assert wires[0, 1] == "batch × 12"
    assert wires[4, 5] == "batch × 3"
    # y goes to the loss; x, which stands right above, to the first module
    assert [entry.title for entry in found.entries] == ["y", "x"]
    assert (-2, 5) in wires
    assert (-1, 0) in wires
    back = {(wire.source, wire.target) for wire in found.backward}
    assert {(n, n - 1) for n in range(1, 6)} <= back


def test_the_step_is_told() -> None:
    (step,) = blocks(made()).steps
    assert (step.title, step.kind, step.changes) == (
        "step of SGD",
        "fused_sgd",
        "changes 6 parameters",
    )


def test_an_evaluation_has_only_a_forward() -> None:
    found = blocks(made().clone(for_test=True))
    assert not any(stage.backward for stage in found.stages)
    assert (found.travels, found.steps, found.backward) == ((), (), ())


def test_many_feeds_alike_are_one_entry() -> None:
    main = static.Program()
    with static.program_guard(main):
        values = [static.data(f"slot_{n}", [None, 4]) for n in range(9)]
        label = static.data("label", [None, 1])
        loss = (nn.Linear(4, 1)(torch.stack(values).sum(0)) - label).abs().mean()
        loss.name = "loss"
    found = blocks(main)
    assert [entry.title for entry in found.entries] == ["label", "slot_0 and 8 more"]


def test_a_module_without_a_name_has_that_of_its_parameters() -> None:
    main = static.Program()
    with static.program_guard(main):
        value = static.data("x", [None, 4])
        loss = nn.Linear(3, 1)(nn.Linear(4, 3)(value).relu()).mean()
        static.minimize(torch.optim.SGD(main.parameters(), lr=0.1), loss)
    titles = [stage.forward.title for stage in blocks(main).stages]
    assert titles == ["linear_0", "relu", "linear_1", "loss"]


def test_modules_of_one_module_have_its_name_in_common() -> None:
    found = blocks_of(form_of(["a.0", "a.1", "a", "b.0"]))
    assert [stage.group for stage in found.stages] == ["a", "a", "a", "b"]
    assert found.stages[2].forward.title == "mul"


def test_rows_of_tables_come_in_and_gradients_are_pushed() -> None:
    found = blocks_of(written(Fields(), ids=(4, 3)).apply(SplitPS()).form)
    assert [(e.title, e.label) for e in found.entries if e.is_table] == [
        *(("pull deep", "3 lookups"), ("pull wide", "1 lookup")),
    ]
    # the ids of the feed lead to the pulls, and their rows to the layers
    wires = {(wire.source, wire.target) for wire in found.forward}
    number = {s.forward.title: 3 + n for n, s in enumerate(found.stages)}
    deep = [number[f"deep.{n}"] for n in range(3)]
    assert {(0, 1), (0, 2), (2, number["wide"]), *((1, layer) for layer in deep)} <= wires
    (step,) = found.steps
    assert (step.kind, step.operations) == ("push deep, wide", "2 tables")
    assert step.changes == "2 dense gradients"
    (travel,) = found.travels
    assert {number["wide"] - 3, deep[0] - 3} <= set(travel.stages)
    assert len(travel.names) == 4
