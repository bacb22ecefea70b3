# SPDX-License-Identifier: Apache-2.0
"""Result pages: spreads, ratios by round, and no local folder names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import report

FAST = report.Series("fast", rates=[20.0, 30.0, 24.0], cpu_ms=[1.0, 1.0, 1.0])
SLOW = report.Series("slow", rates=[10.0, 10.0, 20.0], cpu_ms=[2.0, 2.0, 2.0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_a_spread_contains_its_values(values: list[float]) -> None:
    spread = report.Spread.of(values)
    assert spread.low == min(values)
    assert spread.high == max(values)
    assert spread.low <= spread.median <= spread.high


def test_a_ratio_is_taken_within_each_round() -> None:
    ratio = report.Ratio(FAST, SLOW)
    assert ratio.rounds == [2.0, 3.0, 1.2]
    # not the ratio of the medians, which is 2.4
    assert ratio.spread.median == 2.0


def test_rounds_that_do_not_pair_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        _ = report.Ratio(FAST, report.Series("short", [1.0], [1.0])).rounds


@pytest.mark.parametrize(("bar", "verdict"), [(2.0, "2.00: met"), (2.1, "2.10: missed")])
def test_the_verdict_names_the_bar(bar: float, verdict: str) -> None:
    assert report.Ratio(FAST, SLOW, bar).verdict == verdict


def test_a_section_shows_rates_ratios_and_load() -> None:
    text = report.section("MLP", [SLOW, FAST], [report.Ratio(FAST, SLOW, 1.5)], [0.02, 0.10, None])
    assert "| fast | 24.0 (20.0..30.0) | 1.00 (1.00..1.00) |" in text
    assert "| fast / slow | 2.00 (1.20..3.00) | 1.50: met | 2.000 3.000 1.200 |" in text
    assert "Rounds: 3. Other programs' share of the machine: median 6%, highest 10%." in text


def test_unmeasured_load_is_reported_as_unknown() -> None:
    assert "not known" in report.foreign_line([None, None])


def test_the_command_line_has_no_local_folders() -> None:
    argv = ["/a/b/benchmarks/peers_collective.py", "--paddle", "/c/d/bin/python", "--x=/e/f", "1/2"]
    expected = "python -m benchmarks.peers_collective --paddle python --x=f 1/2"
    assert report.command_line(argv) == expected


def test_a_page_is_dated_and_describes_the_machine(tmp_path: Path) -> None:
    path = report.write("demo", "A claim.", ["## One"], tmp_path / "results")
    text = path.read_text()
    assert path.name.endswith("-demo.md")
    assert text.startswith(f"# demo, {path.name[:10]}\n\nA claim.\n")
    for fact in ("CPU", "cores", "kernel", "PyTorch", "congestion control"):
        assert f"| {fact} |" in text
