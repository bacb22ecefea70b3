# SPDX-License-Identifier: Apache-2.0
"""The budget of code lines holds, and counts what it says."""

from __future__ import annotations

import pytest
from tests.tidy import budget


@pytest.mark.style
def test_no_package_exceeds_its_budget() -> None:
    assert not budget.too_long(budget.counted(), budget.limits())


def test_lines_with_code_count() -> None:
    source = '''"""A docstring."""

# a comment
def function(
    argument: int,
) -> str:
    """Two lines
    of docstring."""
    return f"""{argument}
    is text"""
'''
    assert budget.code_lines(source) == 5


def test_lines_of_scripts_leave_out_comments() -> None:
    assert budget.script_lines("/* a\n b */\n// c\n\nlet a = 1; // d\n") == 1


def test_growth_is_named_with_the_remedy() -> None:
    (message,) = budget.too_long({"src/a": 11, "src/b": 1}, {"src/a": 10, "src/b": 2})
    assert "src/a" in message
    assert "budget.toml" in message


def test_other_tables_of_the_file_stay() -> None:
    text = '# why\n[lines]\n"a" = 2\n\n[other]\nb = 1\n'
    assert budget.written({"a": 1}, text) == '# why\n[lines]\n"a" = 1\n\n[other]\nb = 1\n'
    assert budget.written({"a": 1}, "# why\n") == '# why\n[lines]\n"a" = 1\n'
