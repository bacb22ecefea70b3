# SPDX-License-Identifier: Apache-2.0
"""The shape of the package: no circle, no crowded folder, no tiny file, no name used twice."""

from __future__ import annotations

import ast

import pytest
from tests.tidy import circles, shape
from tests.tidy.exceptions import HOW_TO_SHRINK, NOT_YET_MERGED, excused

pytestmark = pytest.mark.style


def test_no_circle_of_imports() -> None:
    """Imports for types alone and imports inside functions count."""
    assert circles.circles() == excused()["circles"], HOW_TO_SHRINK


def test_a_circle_is_found_wherever_its_imports_stand() -> None:
    modules = {
        "a": ast.parse("from b import name"),
        "b": ast.parse("if TYPE_CHECKING:\n    from pkg import c\n    from pkg import name"),
        "pkg": ast.parse(""),
        "pkg.c": ast.parse("def late():\n    import a"),
        "d": ast.parse("import a, b"),
    }
    graph = circles.imports(modules)
    assert graph["b"] == {"pkg", "pkg.c"}
    assert circles.strong_components(graph) == [["a", "b", "pkg.c"]]


def test_two_circles_are_two() -> None:
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}, "e": {"a"}}
    assert circles.strong_components(graph) == [["a", "b"], ["c", "d"]]


def test_no_folder_is_crowded() -> None:
    assert shape.crowded_folders() == excused()["crowded_folders"], HOW_TO_SHRINK


def test_no_file_that_another_could_hold() -> None:
    """A small file that stays has its reason in the list."""
    assert shape.small_files() == sorted(excused()["small_files"]), HOW_TO_SHRINK
    assert all(excused()["small_files"].values()), f"a reason, or {NOT_YET_MERGED!r}"


def test_each_class_name_is_used_once() -> None:
    assert shape.repeated_classes() == excused()["repeated_classes"], HOW_TO_SHRINK
