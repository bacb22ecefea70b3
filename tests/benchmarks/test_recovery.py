# SPDX-License-Identifier: Apache-2.0
"""Recovery: a small table survives the kill of its server; the figures and verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import recovery

pytestmark = pytest.mark.long

FOUND: dict[str, Any] = {
    "kills": [{"away_s": 2.0, "log_mib": 10.0}, {"away_s": 3.0, "log_mib": 30.0}],
    # a snapshot at the end may be incomplete
    "stretches": [[0.002, 0.004], [0.005], [0.006], [0.005], [0.004], [0.1]],
}


def test_rows_survive_the_kill_of_their_server(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rows", "20000", "--kills", "1", "--deaths", "1", "--snapshot_s", "0.5"]
    more = ["--tail_s", "0.5", "--quiet_s", "1", "--no-write"]
    assert recovery.main([*small, *more]) == 0
    output = capsys.readouterr().out
    assert "| kills, each row compared | 1 | - |" in output
    assert "| s until fleetrun had ended all | " in output


def test_the_claim_holds_for_one_table_size() -> None:
    section = recovery.killed(recovery.CLAIMED_ROWS, FOUND, None)
    assert "| s until the rows were read again | 2.50 (2.00..3.00) | met |" in section
    assert recovery.beside(FOUND["stretches"]) == pytest.approx([0.8, 1.0])
    assert "| - of the speed around it, 2 snapshots | 0.900 (0.800..1.00) | met |" in section
    assert "| steps beside a snapshot | 36.7 ms on average, longest 100 ms, of 3 |" in section
    assert "met" not in recovery.killed(1000, FOUND, None)
    assert "none | - |" in recovery.killed(1000, {**FOUND, "stretches": [[0.1]]}, None)
    assert "| 1.00 (0.500..6.00) | missed |" in recovery.noticed([0.5, 1.0, 6.0])
