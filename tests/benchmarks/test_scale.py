# SPDX-License-Identifier: Apache-2.0
"""Scale: a small table grows, is saved and loaded; the figures and verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.scale_train import check_same, ids_of, told

from benchmarks import jobs, scale

pytestmark = pytest.mark.long

MADE = {
    "worker_mib": 1024.0,
    "servers_mib": [9000.0],
    "call_s": 0.05,
    "beside": {"longest_ms": 20.0},
}


def test_a_small_table_grows_is_saved_and_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale.main(["--rows", "60000", "--folder", str(tmp_path), "--no-write"]) == 0
    output = capsys.readouterr().out
    measured = ("growth, 1 server", "save, alone", "save, beside training", "load, 2 servers")
    for measurement in measured:
        assert f"| {measurement} | " in output
    # the claim is about one size only
    assert "met" not in output
    # the saved files are removed
    assert not list(tmp_path.iterdir())


def test_rows_that_changed_are_an_error() -> None:
    rows = np.zeros((3, 2), np.float32)
    check_same(rows, rows.copy())
    other = rows.copy()
    other[1, 0] = 1e-8
    with pytest.raises(jobs.BenchmarkError, match="1 of 3 rows"):
        check_same(rows, other)


def test_memory_of_all_processes_counts() -> None:
    assert scale.together_mib(MADE) == 10_024.0
    assert scale.verdict(scale.CLAIMED_ROWS, 10_240.0) == "met"
    assert scale.verdict(scale.CLAIMED_ROWS, 10_241.0) == "missed"


def test_a_pause_is_the_longest_of_call_and_step() -> None:
    assert scale.pause_ms(MADE) == 50.0
    assert scale.pause_ms({**MADE, "beside": {"longest_ms": 70.0}}) == 70.0


def test_ids_of_numbers_are_distinct_and_spread() -> None:
    ids = ids_of(np.arange(10_000)).numpy()
    assert len(np.unique(ids)) == 10_000
    assert (ids < 0).mean() == pytest.approx(0.5, abs=0.05)


def test_steps_are_reported_in_milliseconds() -> None:
    assert told([0.001, 0.005, 0.002]) == {"median_ms": 2.0, "longest_ms": 5.0, "steps": 3}
