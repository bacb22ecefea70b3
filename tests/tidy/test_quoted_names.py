# SPDX-License-Identifier: Apache-2.0
"""Pages and comments name files and classes that exist."""

from __future__ import annotations

import ast
import builtins
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.tidy.sources import ROOT, SOURCES, parsed, relative, text

pytestmark = pytest.mark.style

PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
#: files of the reader, and of recipes
OF_THE_READER = {"train.py", "sign.py"}
#: classes of Python and of libraries that comments name
OF_OTHERS = {
    "Any",
    "PrefixStore",
    "SavedTensor",
    "_RendezvousState",
    "GradScaler",
    "OrderedDict",
    "Parameter",
    "Future",
    "Event",
    "Condition",
    "Thread",
}


#: what recipes leave to the reader or take from the tests
OF_RECIPES = {"start", "wait", "Sign", "hosts", "run_workers"}
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def members() -> dict[str, set[str]]:
    """By class of the package, the names of its methods and attributes."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            names = found[node.name]
            for part in ast.walk(node):
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    names.add(part.name)
                elif isinstance(part, ast.Attribute):
                    names.add(part.attr)
                elif isinstance(part, ast.Name):
                    names.add(part.id)
    return found


def quoted(path: Path) -> Iterator[tuple[int, str]]:
    """What comments and strings of a file have between backticks; code has none."""
    for number, line in enumerate(text(path).splitlines(), 1):
        for name in re.findall(r"`([^`]+)`", line):
            yield number, name


def test_files_that_pages_name_exist() -> None:
    folders = ("src", "tests", "rig", "benchmarks", "examples", "docs", "pages", "release")
    files = [str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*.py")]
    for page in PAGES:
        for number, line in enumerate(text(page).splitlines(), 1):
            for name in re.findall(r"(?<![\w/.<{*])[\w/]+\.py\b", line):
                exists = any(f"/{file}".endswith(f"/{name}") for file in files)
                assert exists or name.rsplit("/")[-1] in OF_THE_READER, (
                    f"{relative(page)}:{number} names {name}, which is no file"
                )


def test_methods_that_architecture_names_exist() -> None:
    known, page = members(), text(ROOT / "ARCHITECTURE.md")
    named = re.findall(r"\b(_?[A-Z][a-z]\w*)\.([a-z_]\w+)", page)
    wrong = [f"{owner}.{member}" for owner, member in named if member not in known[owner]]
    assert not wrong, f"ARCHITECTURE.md names {', '.join(wrong)}"


def test_recipes_call_what_exists() -> None:
    """A name that a recipe calls is defined in the recipe, in the package or in Python."""
    known = set(dir(builtins)) | OF_RECIPES
    for path in SOURCES:
        known |= {n.name for n in ast.walk(parsed(path)) if isinstance(n, _DEFINITIONS)}
    page = text(ROOT / "CONTRIBUTING.md")
    recipes = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
    assert recipes
    known |= set(re.findall(r"^ *(?:def|class) (\w+)", recipes, re.M))
    called = set(re.findall(r"(?<![\w.])(\w+)\(", recipes))
    assert not called - known, "CONTRIBUTING.md calls them, and they do not exist"


def test_classes_that_comments_name_exist() -> None:
    known = members()
    wrong = []
    for path in SOURCES:
        for number, name in quoted(path):
            found = re.match(r"(_?[A-Z][a-z]+[A-Za-z]*)(?:\.(\w+))?$", name)
            if found is None:
                continue
            owner, member = found.groups()
            foreign = hasattr(builtins, owner) or hasattr(torch, owner) or owner in OF_OTHERS
            if owner not in known and not foreign and not hasattr(torch.nn, owner):
                wrong.append(f"{relative(path)}:{number} names the class {owner}")
            elif owner in known and member is not None and member not in known[owner]:
                wrong.append(f"{relative(path)}:{number} names {owner}.{member}")
    assert not wrong, "\n".join(wrong)
