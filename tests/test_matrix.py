# SPDX-License-Identifier: Apache-2.0
"""The page that `make matrix` writes."""

from __future__ import annotations

from tests.matrix import BEGIN, END, HEAD, PAGE, Row, merged, row_of

REPORT = (
    '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2" time="7.6"/></testsuites>'
)


def row(torch: str, passed: int) -> Row:
    return Row(torch, "3.11.7", passed, 0, 0, 1, "2026-01-01")


def test_report_becomes_a_row() -> None:
    found = row_of(REPORT, "2.9.1", "3.11.7")
    assert (found.passed, found.failed, found.skipped, found.seconds) == (5, 2, 2, 8)


def test_new_rows_replace_those_of_the_same_versions_in_order() -> None:
    page = f"before\n{BEGIN}{HEAD[0]}\n{HEAD[1]}\n{END}\nbehind\n"
    page = merged(page, [row("2.13.0", 1), row("2.9.1", 2)])
    page = merged(page, [row("2.13.0", 3)])
    expected = [*HEAD, row("2.9.1", 2).line(), row("2.13.0", 3).line()]
    assert page == f"before\n{BEGIN}" + "\n".join(expected) + f"\n{END}\nbehind\n"


def test_page_has_a_place_for_the_table() -> None:
    assert merged(PAGE.read_text(), []).count(BEGIN) == 1
