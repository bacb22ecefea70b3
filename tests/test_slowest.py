# SPDX-License-Identifier: Apache-2.0
"""The page of the slowest tests comes from pytest's report."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests import slowest

REPORT = """<testsuites><testsuite timestamp="2026-11-25T04:00:00.1" time="7.5">
<testcase classname="tests.a.test_b" name="test_one[1-x]" time="1.25"/>
<testcase classname="tests.a.test_b" name="test_one[2-y]" time="2.5"/>
<testcase classname="tests.a.test_b" name="test_two" time="3.0"/>
</testsuite></testsuites>"""


def test_cases_of_a_function_count_together() -> None:
    assert slowest.timed(ElementTree.fromstring(REPORT)) == [
        ("tests.a.test_b::test_one", 3.75, 2),
        ("tests.a.test_b::test_two", 3.0, 1),
    ]


def test_page_has_date_machine_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    monkeypatch.setattr(slowest, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(slowest, "SHOWN", 1)
    assert slowest.main([str(report)]) == 0
    said = (tmp_path / "page.md").read_text()
    assert "from the last `make test`: 2026-11-25." in said
    assert "3 tests took 7 s of both processes together, 8 s by the clock;" in said
    assert "these 1 functions are 56% of it" in said
    assert "| `tests.a.test_b::test_one` | 2 | 3.8 |" in said
    assert "test_two" not in said
    assert "| cores | " in said


def test_missing_report_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slowest.main([str(tmp_path / "none.xml")]) == 1
    assert "none.xml does not exist: run `make test` first" in capsys.readouterr().err
