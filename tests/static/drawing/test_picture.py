# SPDX-License-Identifier: Apache-2.0
"""What a picture shows of a program, before it is written as text."""

import pytest
import torch
from tests.static.drawing.forms import VALUE, form_of
from tests.static.nets import captured, net
from tests.static.resnet import captured_resnet50
from tests.static.table_nets import Fields, written
from torch import nn

from fleetlight import static
from fleetlight.static.drawing.picture import Picture, PictureBox, picture_of
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap
from fleetlight.static.passes.split_ps import SplitPS

pytestmark = pytest.mark.slow

SIZE = VALUE.numel() * VALUE.element_size()


def picture(program: static.Program) -> Picture:
    return picture_of(program.form, program.model, "SGD")


def make_program() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1))


def boxes(of: Picture, *kinds: str) -> list[PictureBox]:
    return [box for box in of.boxes if box.kind in kinds]


def titles(of: Picture, *kinds: str) -> list[str]:
    return [box.lines[0] for box in boxes(of, *kinds)]


def arrows(of: Picture, flow: str = "value") -> dict[tuple[str, str], str]:
    """The label of each arrow, by the titles of the two boxes."""
    title = {box.name: box.lines[0] for box in of.boxes}
    found = [arrow for arrow in of.arrows if arrow.flow == flow]
    return {(title[arrow.source], title[arrow.target]): arrow.label for arrow in found}


def test_modules_are_boxes_with_their_contents() -> None:
    found = picture(make_program())
    assert titles(found, "forward") == ["0", "1", "2", "3", "4"]
    forward = {box.lines[0]: box for box in boxes(found, "forward", "loss")}
    assert forward["0"].lines == ("0", "Linear", "2 ops", "108 parameters · 864 B")
    assert forward["4"].lines[-1] == "fetch output"
    assert forward["0"].full == "0\n1 addmm\n1 views and casts"
    assert titles(found, "loss") == ["loss", "∂ loss"]
    assert "fetch loss, accuracy" in boxes(found, "loss")[0].lines
    gradients = {b.lines[0]: "2 gradients" in b.lines for b in boxes(found, "backward")}
    assert gradients == {"∂ 0": True, "∂ 1": True, "∂ 2": False, "∂ 3": False, "∂ 4": True}
    assert found.beside == tuple((f"f{n}", f"b{n}") for n in range(6))


def test_the_heading_names_the_program_and_its_passes() -> None:
    found = picture(make_program().apply(InsertAllReduce(), FuseAllReduce()))
    assert found.title == "Training step of Sequential"
    assert "171 parameters in 6 tensors · 1.34 KiB" in found.lines[0]
    assert found.lines[1:] == (
        "6 gradients, each reduced separately",
        "all_reduce: 6 -> 1 (25 MiB)",
    )


def test_arrows_show_shapes() -> None:
    flows = arrows(picture(make_program()))
    assert flows["0", "1"] == "batch × 12"
    assert flows["4", "loss"] == "batch × 3"
    assert {("x", "0"), ("y", "loss"), ("loss", "∂ loss"), ("∂ 1", "∂ 0")} <= set(flows)
    assert arrows(picture(make_program()), "kept")["1", "∂ 1"] == "2 kept"


def test_the_optimizer_step_is_a_box() -> None:
    (step,) = boxes(picture(make_program()), "step")
    assert step.lines == ("step of SGD", "fused_sgd", "7 ops", "changes 6 parameters")


def test_kernels_of_param_groups_form_a_chain() -> None:
    model = net()
    groups = [{"params": [p]} for p in list(model.parameters())[:3]]
    found = picture(captured(model, torch.optim.SGD(groups, lr=0.1)))
    assert [box.name for box in boxes(found, "step")] == ["s0", "s1", "s2"]
    assert ("s0", "s1") in {(arrow.source, arrow.target) for arrow in found.arrows}


def test_an_evaluation_shows_only_the_forward() -> None:
    found = picture(make_program().clone(for_test=True))
    assert found.title.startswith("Forward of")
    assert not boxes(found, "backward", "bucket", "step")
    assert found.beside == ()


def test_similar_feeds_share_one_box() -> None:
    main = static.Program()
    with static.program_guard(main):
        values = [static.data(f"slot_{n}", [None, 4]) for n in range(9)]
        label = static.data("label", [None, 1])
        loss = (nn.Linear(4, 1)(torch.stack(values).sum(0)) - label).abs().mean()
        loss.name = "loss"
    assert set(titles(picture(main), "feed")) == {"label", "slot_0 and 8 more"}


def test_an_unnamed_module_is_titled_by_its_parameters() -> None:
    main = static.Program()
    with static.program_guard(main):
        value = static.data("x", [None, 4])
        loss = nn.Linear(3, 1)(nn.Linear(4, 3)(value).relu()).mean()
        static.minimize(torch.optim.SGD(main.parameters(), lr=0.1), loss)
    assert titles(picture(main), "forward") == ["linear_0", "relu", "linear_1"]


def test_a_frame_surrounds_the_children_of_a_module() -> None:
    found = picture_of(form_of(["a.0", "a.1", "a", "b.0"]))
    (frame,) = found.frames
    assert (frame.title, frame.members) == ("a", ("f0", "f1", "f2", "b0", "b1", "b2"))
    assert titles(found, "forward")[2] == "mul"


def test_tables_show_pulls_and_pushes() -> None:
    found = picture(written(Fields(), ids=(4, 3)).apply(SplitPS()))
    assert [box.lines for box in boxes(found, "table")] == [
        *(("pull deep", "3 lookups"), ("pull wide", "1 lookup"))
    ]
    flows = set(arrows(found))
    feed = titles(found, "feed")[0]
    deep = [("pull deep", f"deep.{n}") for n in range(3)]
    assert {(feed, "pull deep"), (feed, "pull wide"), ("pull wide", "wide"), *deep} <= flows
    (step,) = boxes(found, "step")
    assert step.lines == ("step outside", "push deep, wide", "2 tables", "2 dense gradients")
    pushed = set(arrows(found, "gradient"))
    assert {("∂ wide", "step outside"), ("∂ deep.0", "step outside")} <= pushed


def test_unreduced_gradients_flow_directly_to_the_step() -> None:
    found = picture_of(form_of(["a", "b"]))
    assert not boxes(found, "bucket", "overlapped")
    assert set(arrows(found, "gradient")) == {
        ("∂ 0", "optimizer's step"),
        ("∂ 1", "optimizer's step"),
    }


def test_buckets_show_their_gradients_and_reduction_times() -> None:
    found = picture_of(form_of(list("abcd"), buckets=[1, 2]))
    one, other = boxes(found, "overlapped")
    assert one.lines == (
        *(f"1 gradient · {SIZE} B · float32", "1 all-reduce"),
        *("begins after ∂ 3", "ends before the step"),
    )
    assert one.full.endswith("3.weight")
    assert "begins after ∂ 1" in other.lines
    flows = {(a.source, a.target) for a in found.arrows if a.flow == "gradient"}
    assert flows == {
        *(("b3", "r0"), ("b2", "r1"), ("b1", "r1")),
        *(("r0", "s0"), ("r1", "s0")),
        ("b0", "s0"),
    }


def test_reductions_at_the_same_time_share_one_box() -> None:
    (bucket,) = boxes(picture(captured_resnet50().apply(InsertAllReduce())), "bucket")
    assert "161 all-reduces" in bucket.lines
    assert "begins after backward" in bucket.lines


@pytest.mark.long
def test_resnet50_overlaps_4_of_5_buckets_with_backward() -> None:
    found = picture(captured_resnet50().apply(InsertAllReduce(), FuseAllReduce(), Overlap()))
    assert len(boxes(found, "forward", "loss")) == 24 + 1
    assert [len(boxes(found, kind)) for kind in ("overlapped", "bucket")] == [4, 1]
    held = [int(b.lines[0].split()[0]) for b in boxes(found, "overlapped", "bucket")]
    assert sum(held) == 161
    assert [frame.title for frame in found.frames] == [
        "stem",
        *(f"stage{n}" for n in range(1, 5)),
        "head",
    ]
