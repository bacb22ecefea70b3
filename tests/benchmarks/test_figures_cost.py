# SPDX-License-Identifier: Apache-2.0
"""The cost of figures: one job records them beside a page, the other does not."""

from __future__ import annotations

from pathlib import Path

from benchmarks import figures_cost


def test_only_one_job_records_figures_and_has_a_page(tmp_path: Path) -> None:
    recorded = figures_cost.job(figures_cost.WITH, tmp_path).commands
    plain = figures_cost.job(figures_cost.WITHOUT, None).commands
    assert [one.argv for one in recorded[:-1]] == [one.argv for one in plain]
    assert all(one.environment["FLEET_LOG_DIR"] == str(tmp_path) for one in recorded[:-1])
    assert not any("FLEET_LOG_DIR" in one.environment for one in plain)
    assert recorded[-1].argv[-2:] == ["--page", str(tmp_path)]
