# SPDX-License-Identifier: Apache-2.0
"""Code that pages print, also what no test runs: its names, arguments and flags exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages.printed.blocks import SHELL, blocks_of, section

import fleetlight
from fleetlight.cli import arguments
from fleetlight.cli import fleetlight as tools
from fleetlight.errors import FleetError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```" in page.read_text(encoding="utf-8")
]
_UNKNOWN: Any = object()
#: what an excerpt may use without its import
_USUAL = {"fleet": fleetlight}
_PACKAGES = ("fleetlight", "torch", "numpy")
_TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _is_checked(module: str) -> bool:
    # the packages of some extras may be missing
    return module.split(".")[0] in _PACKAGES and module != "fleetlight.ray"


class PrintedNames(ast.NodeVisitor):
    """Finds names and arguments that the packages do not have."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = dict(names)
        self.wrong: list[str] = []

    def imported(self, tree: ast.AST) -> dict[str, Any]:
        """The names that are known after the imports of a block."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for one in filter(lambda one: _is_checked(one.name), node.names):
                    module = importlib.import_module(one.name)
                    root = one.name.split(".")[0]
                    self._names[one.asname or root] = module if one.asname else sys.modules[root]
            elif isinstance(node, ast.ImportFrom) and _is_checked(node.module or ""):
                module = importlib.import_module(node.module or "")
                for one in node.names:
                    self._names[one.asname or one.name] = self._member(module, one.name)
        return self._names

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._value(node.func)
        if called is not _UNKNOWN:
            self._check(called, node)
        for one in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(one)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self._names)
        for one in node.args.args:
            self._names.pop(one.arg, None)
        self.generic_visit(node)
        self._names = before

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in ast.walk(ast.Module([ast.Expr(one) for one in node.targets], [])):
            if isinstance(target, ast.Name):
                self._names.pop(target.id, None)

    def _value(self, node: ast.expr) -> Any:
        """What an expression names; `_UNKNOWN` unless it is part of a package."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute):
            value = self._value(node.value)
            if value is _UNKNOWN:
                return _UNKNOWN
            return self._member(value, node.attr)
        self.visit(node)
        return _UNKNOWN

    def _member(self, value: Any, name: str) -> Any:
        found = getattr(value, name, _UNKNOWN)
        if found is _UNKNOWN and inspect.ismodule(value):
            with contextlib.suppress(ImportError):
                return importlib.import_module(f"{value.__name__}.{name}")
        if found is _UNKNOWN and (inspect.ismodule(value) or inspect.isclass(value)):
            self.wrong.append(f"{value.__name__} has no {name}")
        return found

    def _check(self, called: Any, node: ast.Call) -> None:
        try:
            signature = inspect.signature(called)
        except (TypeError, ValueError):
            return
        kinds = {one.kind for one in signature.parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            known = signature.parameters
            named = [one.arg for one in node.keywords if one.arg is not None]
            self.wrong += [
                f"{ast.unparse(node)}: no {name}=" for name in named if name not in known
            ]
        if any(isinstance(one, ast.Starred) for one in node.args):
            return
        with contextlib.suppress(TypeError):
            signature.bind_partial(*[None] * len(node.args))
            return
        self.wrong.append(f"{ast.unparse(node)}: too many arguments")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_names_and_arguments_of_python_exist(page: Path) -> None:
    names: dict[str, Any] = dict(_USUAL)
    wrong = []
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language == "python":
            tree = ast.parse(block.code)
            printed = PrintedNames(names)
            # a page imports once, for all blocks below
            names = printed.imported(tree)
            printed.visit(tree)
            wrong += printed.wrong
    assert wrong == []


def test_what_does_not_exist_is_found() -> None:
    printed = PrintedNames(_USUAL)
    code = "fleet.no_such(1)\nfleet.init(no_such=1)\nfleet.worker_num(1, 2)\nrows = fleet.nn.x"
    tree = ast.parse(code)
    printed.visit(tree)
    assert [line.split(": ")[-1] for line in printed.wrong] == [
        "fleetlight has no no_such",
        "no no_such=",
        "too many arguments",
        f"{fleetlight.nn.__name__} has no x",
    ]


def test_checkpoints_from_python_are_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    [program] = [one.code for one in section(text, "From Python") if one.language == "python"]
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = model.weight.detach().clone()
    write, load = program.split("saved = ")
    monkeypatch.chdir(tmp_path)
    names = {"model": model, "optimizer": optimizer}
    exec(write, names)
    optimizer.step()
    exec(f"saved = {load}", names)
    assert torch.equal(model.weight, saved)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each simple command of our own."""
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language not in SHELL:
            continue
        text = block.code.replace("\\\n", " ")
        for line in text.splitlines():
            for part in re.split(r"\||&&|;|2>|>|&(?=\s|$)", line):
                with contextlib.suppress(ValueError):
                    words = shlex.split(part, comments=True)
                    while words and re.match(r"\w+=|\$$|exec$|time$|nohup$|do$", words[0]):
                        words = words[1:]
                    if words:
                        yield words


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_flags_of_commands_exist(page: Path) -> None:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text()))
    wrong = []
    for name, *words in commands(page):
        try:
            if name == "fleetrun" and words:
                arguments.parse(words)
            elif name == "fleetlight" and words:
                tools.parser().parse_args(words)
            elif name == "make":
                wrong += [f"make {one}" for one in words if "=" not in one and one not in targets]
        except (FleetError, ValueError) as error:
            wrong.append(f"{shlex.join([name, *words])}: {error}")
        except SystemExit as end:
            if end.code:
                wrong.append(shlex.join([name, *words]))
    assert wrong == []
