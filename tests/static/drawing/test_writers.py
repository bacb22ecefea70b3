# SPDX-License-Identifier: Apache-2.0
"""The text of a picture can be parsed, whatever names it contains."""

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
from tests.static.nets import captured, net
from tests.static.resnet import captured_resnet50

from fleetlight import static
from fleetlight.errors import ConfigError
from fleetlight.static.drawing.picture import Picture, PictureArrow, PictureBox, PictureFrame
from fleetlight.static.drawing.writers import dot_of, mermaid_of
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap

pytestmark = pytest.mark.slow

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
TOKEN = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|(->|[\w.]+|[{}\[\];,=]))')
MERMAID = re.compile(
    r'\s*(?:flowchart TB|heading\["[^"]*"\]|\w+\["([^"]*)"\]:::\w+|subgraph \w+\["([^"]*)"\]|\w+'
    r'|\w+ (?:-->|-\.->|==>)(?:\|"([^"]*)"\|)? \w+|classDef \w+ fill:#\w+,stroke:#\w+,color:#\w+)'
)


def make_program() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1))


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
