# SPDX-License-Identifier: Apache-2.0
"""What a picture shows of a program, before it is written as text."""

import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.static.drawing.forms import VALUE, form_of
from tests.static.nets import batch, captured, net
from tests.static.resnet import captured_resnet50
from tests.static.table_nets import Fields, written
from torch import Tensor, nn

from fleetlight import static
from fleetlight.errors import ConfigError
from fleetlight.static.drawing.levels import MAX_LEVELS, carried_of, levels_of, names_of_operations
from fleetlight.static.drawing.picture import (
    Picture,
    PictureArrow,
    PictureBox,
    PictureFrame,
    picture_of,
)
from fleetlight.static.drawing.writers import dot_of, mermaid_of
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


# -- operations are grouped by module, at a depth that gives few levels ---------------------------

NAMES = st.lists(st.sampled_from(["a", "b", "0", "1"]), max_size=4).map(".".join)
PATHS = st.lists(NAMES, min_size=1, max_size=60)


def paths_of(form: static.Program) -> list[str]:
    return [level.path for level in levels_of(form.form.graph)]


@given(PATHS, st.integers(1, 12))
def test_every_operation_is_at_one_of_few_levels(paths: list[str], most: int) -> None:
    graph = form_of(paths).graph
    levels = levels_of(graph, most)
    assert 1 <= len(levels) <= most
    forward = [node for level in levels for node in level.forward]
    parts = [n.meta["part"] for n in graph.nodes if n.op == "call_function"]
    assert [node.meta["part"] for node in forward] == ["forward"] * parts.count("forward")
    assert forward == sorted(forward)
    backward = [node for level in levels for node in level.backward]
    carried = carried_of(graph)
    expected = [n for n in graph.nodes if n.meta.get("part") == "backward" and n not in carried]
    assert sorted(backward) == expected


def test_modules_are_split_while_levels_stay_few() -> None:
    wide = [f"layers.{n}.{part}" for n in range(20) for part in ("attention", "norm", "mlp")]
    levels = levels_of(form_of(wide).graph)
    assert [level.path for level in levels] == [f"layers.{n}" for n in range(20)]
    assert [level.path for level in levels_of(form_of(wide[:9]).graph)] == wide[:9]


def test_many_children_of_one_module_share_levels() -> None:
    levels = levels_of(form_of([f"layers.{n}" for n in range(100)]).graph)
    assert len(levels) <= MAX_LEVELS
    assert levels[0].path == "layers.0 … layers.2"


def test_without_modules_each_operation_is_a_level() -> None:
    levels = levels_of(form_of([""] * 5, skips=[(0, 3)]).graph)
    assert [len(level.forward) for level in levels] == [1] * 6


class Twice(nn.Module):
    """Calls one module twice, with another operation between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x).relu()).tanh())


def twice() -> static.Program:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return static.capture(model, nn.functional.cross_entropy, optimizer, batch(0))


def test_backward_is_at_the_level_of_its_forward() -> None:
    """Repeated calls of one module, and operations of the module itself, remain distinct."""
    levels = levels_of(twice().form.graph)
    assert [level.path for level in levels] == ["inner", "", "inner", "", "last", ""]
    names = [[str(node.target) for node in level.backward] for level in levels]
    assert any("threshold_backward" in name for name in names[1])
    assert any("tanh_backward" in name for name in names[3])
    assert all(any("aten.mm" in name for name in names[number]) for number in (0, 2, 4))
    assert any("log_softmax_backward" in name for name in names[5])


def test_backward_of_a_loaded_program_is_at_the_same_level() -> None:
    program = twice()
    for node in program.form.graph.nodes:
        for key in ("derivative", "calls"):
            node.meta.pop(key, None)
    levels = levels_of(program.form.graph)
    assert len(levels) == 6
    names = [[str(node.target) for node in level.backward] for level in levels]
    assert any("threshold_backward" in name for name in names[1])
    assert any("tanh_backward" in name for name in names[3])


def test_operations_without_derivative_take_no_backward_from_others() -> None:
    """The counter of the batch norm directly follows the linear layer."""
    model = net()
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for node in program.form.graph.nodes:
        for key in ("derivative", "calls"):
            node.meta.pop(key, None)
    levels = levels_of(program.form.graph)
    assert [level.path for level in levels] == ["0", "1", "2", "3", "4", ""]
    products = [any("aten.mm" in str(n.target) for n in level.backward) for level in levels]
    assert products == [True, False, False, False, True, False]
    assert all(level.backward for level in levels)


def test_without_modules_backward_is_matched_by_derivative() -> None:
    program = static.Program()
    with static.program_guard(program):
        first, last = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 1))
        x, y = static.data("x", [None, 8]), static.data("y", [None, 1])
        loss = ((torch.tanh(x @ first) @ last - y) ** 2).mean()
        static.minimize(torch.optim.SGD([first, last], lr=0.1), loss)
    levels = levels_of(program.form.graph)
    done = [next(iter(names_of_operations(level.forward))) for level in levels]
    assert done == ["mm", "tanh", "mm", "sub", "pow", "mean"]
    products = [names_of_operations(level.backward).get("mm", 0) for level in levels]
    assert products == [1, 0, 2, 0, 0, 0]
    assert "tanh_backward" in names_of_operations(levels[1].backward)


# -- the text of a picture can be parsed, whatever names it contains ------------------------------

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
TOKEN = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|(->|[\w.]+|[{}\[\];,=]))')
MERMAID = re.compile(
    r'\s*(?:flowchart TB|heading\["[^"]*"\]|\w+\["([^"]*)"\]:::\w+|subgraph \w+\["([^"]*)"\]|\w+'
    r'|\w+ (?:-->|-\.->|==>)(?:\|"([^"]*)"\|)? \w+|classDef \w+ fill:#\w+,stroke:#\w+,color:#\w+)'
)


def picture_with(name: str) -> Picture:
    boxes = (PictureBox("f0", "forward", (name,)), PictureBox("b0", "backward", ("∂",), name))
    arrows = (PictureArrow("f0", "b0", name),)
    frames = (PictureFrame(name, ("f0", "b0")),)
    return Picture(name, (name,), boxes, arrows, frames, (("f0", "b0"),))


def strings_of_dot(text: str) -> list[str]:
    """The quoted strings of the text; fails if a part is not valid DOT."""
    found, at = [], 0
    while at < len(text.rstrip()):
        token = TOKEN.match(text, at)
        assert token, text[at : at + 40]
        if token[1] is not None:
            found.append(html.unescape(re.sub(r"\\(.)", r"\1", re.sub(r"\\[ln]$", "", token[1]))))
        at = token.end()
    return found


def labels_of_mermaid(text: str) -> Iterator[str]:
    for line in text.splitlines():
        read = MERMAID.fullmatch(line)
        assert read, line
        for label in filter(None, read.groups()):
            yield re.sub(r"#(\d+);", lambda found: chr(int(found[1])), label)


def readable(name: str) -> str:
    return re.sub(
        r"[^\t\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", name
    )


@given(
    st.text(min_size=1, max_size=50)
    | st.sampled_from(['a "b"', "<&amp;>", "層.0", "back\\slash", "x]", "`"])
)
def test_every_name_survives_both_formats(name: str) -> None:
    picture = picture_with(name)
    assert strings_of_dot(dot_of(picture)).count(readable(name)) >= 3  # a box, a frame and an arrow
    assert list(labels_of_mermaid(mermaid_of(picture))).count(readable(name)) >= 3


def test_both_formats_show_the_program_and_are_deterministic() -> None:
    drawing = captured_resnet50().apply(InsertAllReduce(), FuseAllReduce(), Overlap()).draw()
    assert strings_of_dot(drawing.dot)
    labels = "\n".join(labels_of_mermaid(drawing.mermaid))
    for shown in ("stage4.1", "Bottleneck", "begins after ∂ stage4.1", "step of SGD", "17 kept"):
        assert shown in drawing.dot
        assert shown in labels
    model = net()
    again = captured(model, torch.optim.SGD(model.parameters(), lr=0.1)).draw()
    assert (again.dot, again.mermaid) == (make_program().draw().dot, make_program().draw().mermaid)


def test_long_names_are_full_in_the_tooltip() -> None:
    name = "name_" * 30
    assert f'label="{name[:59]}…", tooltip="{name}' in dot_of(picture_with(name))


@pytest.mark.long
def test_text_needs_no_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    drawing = make_program().draw(tmp_path / "program.dot")
    drawing.save(tmp_path / "program.mmd")
    assert (tmp_path / "program.dot").read_text(encoding="utf-8") == drawing.dot
    assert (tmp_path / "program.mmd").read_text(encoding="utf-8") == drawing.mermaid
    assert "Drawing of Training step of Sequential" in repr(drawing)
    assert list(drawing._repr_mimebundle_()) == ["text/markdown"]
    with pytest.raises(ConfigError, match=r"install .*graphviz.* or draw to a \.dot or \.mmd"):
        make_program().draw(tmp_path / "program.svg")
    with pytest.raises(ConfigError, match=r"got the path .*program\.gif.*\.dot, \.mmd, \.svg"):
        make_program().draw(tmp_path / "program.gif")
    with pytest.raises(ConfigError, match="does not exist"):
        make_program().draw(str(tmp_path / "missing" / "program.dot"))


@needs_graphviz
def test_graphviz_renders_files(tmp_path: Path) -> None:
    program = static.Program()
    with static.program_guard(program):
        static.data('<x & "y\\">', [None, 4]).mean().name = "層"
    drawing = program.draw(tmp_path / "program.svg")
    root = ElementTree.parse(tmp_path / "program.svg").getroot()
    shown = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]
    assert {'<x & "y\\">', "fetch 層"} <= set(shown)
    assert list(drawing._repr_mimebundle_()) == ["image/svg+xml"]
    program.draw(tmp_path / "program.png")
    assert (tmp_path / "program.png").read_bytes().startswith(b"\x89PNG")


@needs_graphviz
def test_graphviz_places_backward_beside_forward() -> None:
    program = captured_resnet50().apply(InsertAllReduce(), FuseAllReduce(), Overlap())
    root = ElementTree.fromstring(program.draw().svg)
    kind = {e.findtext("{*}title"): e.get("class") for e in root.iter() if e.get("class")}
    assert len([name for name in kind if kind[name] == "cluster"]) == 6
    places = {}
    for element in root.iter():
        if element.get("class") == "node":
            assert element.find(".//{*}text") is not None
            path = element.find(".//{*}path")
            assert path is not None
            ys = [float(y) for y in re.findall(r",(-?[\d.]+)", str(path.get("d")))]
            places[element.findtext("{*}title")] = (min(ys) + max(ys)) / 2
    forward = [places[f"f{n}"] for n in range(24)]
    assert forward == sorted(forward)
    assert all(abs(places[f"b{n}"] - places[f"f{n}"]) < 30 for n in range(24))
    assert places["s0"] < places["r4"] < places["r0"]
