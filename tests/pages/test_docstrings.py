# SPDX-License-Identifier: Apache-2.0
"""Every public object has arguments, returns, raises and an example, and each example runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_docs import ROOT
from torch import nn

import fleetlight as fleet
from fleetlight import strategy
from fleetlight.fleet.api import __all__ as API
from fleetlight.launch import exit_codes
from fleetlight.strategy.settings import Settings

REFERENCE = {
    path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md")
}
NAMES = [name for text in REFERENCE.values() for name in re.findall(r"^::: (\S+)$", text, re.M)]
OBJECTS: dict[str, Any] = {name: pkgutil.resolve_name(name) for name in NAMES}
PACKAGES = ("data", "errors", "metrics", "nn", "optim", "serve", "static", "util")


def test_every_public_name_is_in_the_reference() -> None:
    assert len(NAMES) == len(OBJECTS)
    # another name of the same object has a line instead
    same = {
        f"fleetlight.{name}" for name in re.findall(r"^- `fleet\.(\w+)` is", REFERENCE["job"], re.M)
    }
    public = {*API, *(f"strategy.{one}" for one in strategy.__all__ if one.endswith("Configs"))}
    for name in PACKAGES:
        public |= {f"{name}.{one}" for one in pkgutil.resolve_name(f"fleetlight.{name}").__all__}
    assert {f"fleetlight.{name}" for name in public - {"errors"}} - set(NAMES) == same


def test_page_of_errors_has_the_tree_and_the_exit_codes() -> None:
    text = REFERENCE["errors"]
    assert inspect.cleandoc(fleet.errors.__doc__ or "").split("\n\n")[1] in text
    rows = dict(re.findall(r"^\| (\d+) \|.*\| (.*) \|$", text, re.MULTILINE))
    for name in fleet.errors.__all__:
        code = exit_codes.error_code(getattr(fleet.errors, name)("x"))
        assert f"`{name}`" in rows[str(code)], name


def sections(found: Any) -> dict[str, str]:
    """The sections of a docstring by their titles; what is before them has none."""
    titles = r"^(Args|Returns|Yields|Raises|Example):$"
    text, *rest = re.split(titles, inspect.getdoc(found) or "", flags=re.MULTILINE)
    return {"": text, **dict(zip(rest[::2], rest[1::2], strict=True))}


def entries(section: str) -> list[str]:
    return re.findall(r"^    ([\w.*]+): ", section, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_docstring_is_complete(name: str) -> None:
    found = OBJECTS[name]
    doc = sections(found)
    assert doc[""]
    assert ">>> " in doc["Example"]
    if not (inspect.isclass(found) and issubclass(found, (Settings, BaseException))):
        assert entries(doc.get("Args", "")) == parameters(found)
    if inspect.isfunction(found) and not is_context(found) and returns(found):
        assert doc["Returns"]
    raises = entries(doc.get("Raises", ""))
    for error in raises:
        assert hasattr(fleet.errors, error), f"{name} raises {error}, which is no public error"
    assert raised_in(found) <= set(raises), f"{name} raises errors that it does not name"
    if inspect.isclass(found) and issubclass(found, fleet.errors.FleetError):
        assert "\nWhat to do: " in doc[""]


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
    run(sections(OBJECTS[name])["Example"], name)


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
