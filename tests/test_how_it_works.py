# SPDX-License-Identifier: Apache-2.0
"""The traces of `docs/how-it-works.md`: each function exists and calls the next one."""

from __future__ import annotations

import ast
import itertools
import re
from typing import NamedTuple

import pytest
from tests.tidy.sources import PACKAGE, ROOT, parsed

PAGE = ROOT / "docs" / "how-it-works.md"
_STEP = re.compile(r"^\d+\. `(\S+\.py)` `(\S+)`: ")


class Step(NamedTuple):
    """A function in a file of the package."""

    file: str
    function: str

    @property
    def name(self) -> str:
        return self.function.rpartition(".")[2]


def traces(page: str) -> list[list[Step]]:
    """The numbered lists of the page; any other line ends a list."""
    found: list[list[Step]] = [[]]
    for line in page.splitlines():
        if match := _STEP.match(line):
            found[-1].append(Step(*match.groups()))
        elif line and found[-1]:
            found.append([])
    return [trace for trace in found if trace]


TRACES = traces(PAGE.read_text())
CALLS = [pair for trace in TRACES for pair in itertools.pairwise(trace)]


def definition(step: Step) -> ast.AST | None:
    """The definition of the dotted name, in a class or in the module."""
    place: ast.AST | None = parsed(PACKAGE / step.file)
    for name in step.function.split("."):
        place = next(
            (d for d in getattr(place, "body", []) if getattr(d, "name", "") == name), None
        )
    return place


def names_in(place: ast.AST) -> set[str]:
    nodes = list(ast.walk(place))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return {name.lstrip("_") for name in attributes | names}


def test_every_numbered_line_is_a_step() -> None:
    numbered = re.findall(r"^\d+\. .*$", PAGE.read_text(), re.MULTILINE)
    assert [line for line in numbered if not _STEP.match(line)] == []
    assert len(numbered) == sum(map(len, TRACES)) > 40


@pytest.mark.parametrize("step", sorted({s for trace in TRACES for s in trace}), ids=str)
def test_each_function_exists(step: Step) -> None:
    assert (PACKAGE / step.file).exists(), f"{PAGE.name} names {step.file}"
    assert definition(step), f"{PAGE.name}: {step.file} has no {step.function}"


@pytest.mark.parametrize(("step", "following"), CALLS, ids=lambda step: step.function)
def test_each_step_calls_the_next(step: Step, following: Step) -> None:
    place = definition(step)
    assert place is not None
    # a callback is passed under its public name
    name = following.name.lstrip("_")
    assert name in names_in(place), f"{PAGE.name}: {step.function} does not call {name}"


def test_missing_call_is_found() -> None:
    page = "1. `errors.py` `a`: x.\n2. `errors.py` `b`: y.\n\ntext\n\n1. `wire/tls.py` `C.d`: z.\n"
    assert traces(page) == [[("errors.py", "a"), ("errors.py", "b")], [("wire/tls.py", "C.d")]]
    assert definition(Step("errors.py", "none")) is None
    assert names_in(ast.parse("def a(): self.b._c(d)")) == {"self", "b", "c", "d"}
