# SPDX-License-Identifier: Apache-2.0
"""Every public object has arguments, returns, raises and an example, and each example runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages.docstrings import docstring_of
from pages.public import PAGES, methods_of, objects
from torch import nn

import fleetlight as fleet
from fleetlight.fleet.api import __all__ as API
from fleetlight.strategy.settings import Settings

OBJECTS = dict(objects())
NAMES = sorted(OBJECTS)


def test_every_public_name_is_in_the_reference() -> None:
    listed = [name for page in PAGES for name in page.names]
    assert len(listed) == len(set(listed))
    assert {f"fleet.{name}" for name in API if name != "errors"} <= set(listed)


@pytest.mark.parametrize("name", NAMES)
def test_docstring_is_complete(name: str) -> None:
    found = OBJECTS[name]
    doc = docstring_of(found)
    assert doc.text
    assert ">>> " in doc.example, f"{name} has no example"
    if not (inspect.isclass(found) and issubclass(found, (Settings, BaseException))):
        assert list(doc.arguments) == parameters(found)
    if inspect.isfunction(found) and not is_context(found) and returns(found):
        assert doc.returns, f"{name} does not say what it returns"
    for error in doc.raises:
        assert hasattr(fleet.errors, error), f"{name} raises {error}, which is no public error"
    assert raised_in(found) <= set(doc.raises), f"{name} raises errors that it does not name"
    if inspect.isclass(found) and issubclass(found, fleet.errors.FleetError):
        assert doc.advice, f"{name} does not say what to do"
    for method, value in methods_of(found) if inspect.isclass(found) else ():
        assert inspect.getdoc(value), f"{name}.{method}"


def parameters(found: Any) -> list[str]:
    try:
        return [name for name in inspect.signature(found).parameters if name != "self"]
    except ValueError:
        return []


def returns(found: Any) -> bool:
    return inspect.signature(found).return_annotation not in ("None", None)


def is_context(found: Any) -> bool:
    """True for a context manager, whose value scripts do not use."""
    return hasattr(found, "__wrapped__") and inspect.isgeneratorfunction(inspect.unwrap(found))


def raised_in(found: Any) -> set[str]:
    """Errors that the code of a function, or of a class's constructor, raises itself."""
    inner = vars(found).get("__init__") if inspect.isclass(found) else found
    inner = inspect.unwrap(inner) if inner else None
    if not inspect.isfunction(inner):
        return set()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    except (OSError, SyntaxError):
        return set()
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    calls = {call.func.id for call in raised if is_named_call(call)}  # type: ignore[union-attr]
    return calls & set(fleet.errors.__all__)


def is_named_call(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for files, and no job before and after."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    fleet.reset()


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name: str) -> None:
    run(docstring_of(OBJECTS[name]).example, name)


def run(example: str, name: str) -> None:
    """Run a doctest with the names that the reference promises."""
    names = {"fleet": fleet, "torch": torch, "nn": nn}
    test = doctest.DocTestParser().get_doctest(example, names, name, None, None)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    printed: list[str] = []
    results = doctest.DocTestRunner(optionflags=flags).run(test, out=printed.append)
    assert results.failed == 0, "".join(printed)


def test_wrong_example_is_found() -> None:
    with pytest.raises(AssertionError, match="Expected"):
        run(">>> 1 + 1\n3", "one")
