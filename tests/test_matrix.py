# SPDX-License-Identifier: Apache-2.0
"""The page that `make matrix` writes."""

from __future__ import annotations

from tests.matrix import PAGE, merged, row_of

REPORT = (
    '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2" time="7.6"/></testsuites>'
)


def test_a_report_becomes_a_row_of_the_page() -> None:
    row = row_of(REPORT, "2.9.1", "3.11.7")
    assert (row.passed, row.failed, row.skipped, row.seconds) == (5, 2, 2, 8)
    assert row.line() in merged(PAGE.read_text(), [row]).splitlines()
