# SPDX-License-Identifier: Apache-2.0
"""The text of a picture: XML that says the same each time, and can be looked at anywhere."""

from __future__ import annotations

import re
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
from fleetlight.static.drawing import Drawing, drawing_of
from fleetlight.static.drawing.scene import Box, Scene, Text
from fleetlight.static.drawing.svg import svg_of
from fleetlight.static.passes import FuseAllReduce, InsertAllReduce, Overlap


def made() -> static.Program:
    model = net()
    return captured(model, torch.optim.SGD(model.parameters(), lr=0.1))


def texts(drawing: Drawing) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(drawing.svg).iter() if e.text]


def test_a_picture_stands_alone_and_knows_light_and_dark() -> None:
    svg = made().draw()._repr_svg_()
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme:dark" in svg
    assert not re.search(r"<script|href|url\(|@import|@font-face", svg)


def test_it_tells_what_the_program_and_its_passes_do() -> None:
    told = texts(made().apply(InsertAllReduce(), FuseAllReduce()).draw())
    assert "all_reduce: 6 -> 1 (25 MiB)" in told
    assert "Training step of Sequential" in told
    assert {"x", "y", "loss", "∂ loss", "step of SGD", "BatchNorm1d", "batch × 12"} <= set(told)


@pytest.mark.slow
def test_resnet50_is_small_and_the_same_each_time() -> None:
    program = captured_resnet50().apply(InsertAllReduce(), FuseAllReduce(), Overlap())
    svg = program.draw().svg
    assert len(svg.encode()) < 200_000
    assert svg == drawing_of(program.form, program.model, program.optimizer).svg
    model = net()
    again = captured(model, torch.optim.SGD(model.parameters(), lr=0.1)).draw()
    assert again.svg == made().draw().svg


@given(st.text(), st.text())
def test_every_name_can_be_written(name: str, full: str) -> None:
    scene = Scene(100.0, 100.0, boxes=[Box(1, 1, 50, 20, "forward", full)])
    scene.texts.append(Text(2, 10, name))
    root = ElementTree.fromstring(svg_of(scene))
    found = [e.text or "" for e in root.iter() if e.tag.endswith("}text")]
    readable = re.sub(r"[^\n\t\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", name)
    assert found == [readable]


def test_unusual_names_are_escaped() -> None:
    program = static.Program()
    with static.program_guard(program):
        value = static.data('<x & "y">', [None, 4])
        loss = value.mean()
        loss.name = "<loss>"
    told = texts(program.draw())
    assert {'<x & "y">', "<loss>"} <= set(told)


def test_what_is_too_long_is_told_to_who_points_at_it() -> None:
    program = static.Program()
    with static.program_guard(program):
        static.data("name_" * 30, [None, 4]).mean().name = "loss"
    told = texts(program.draw())
    assert any(text.endswith("…" + "name_" * 30) for text in told)


@pytest.mark.slow
def test_it_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    drawing = made().draw(tmp_path / "program.svg")
    assert (tmp_path / "program.svg").read_text(encoding="utf-8") == drawing.svg
    assert "Drawing of Training step of Sequential" in repr(drawing)
    with pytest.raises(ConfigError, match=r"got the path .*program\.png.* ends in \.svg"):
        made().draw(tmp_path / "program.png")
    with pytest.raises(ConfigError, match="does not exist"):
        made().draw(str(tmp_path / "missing" / "program.svg"))
