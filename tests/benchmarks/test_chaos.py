# SPDX-License-Identifier: Apache-2.0
"""Chaos: the programs it runs, and the output it keeps."""

from __future__ import annotations

import pytest

from benchmarks import chaos


def test_each_program_runs_as_often_as_claimed() -> None:
    found = dict(chaos.programs(chaos._parse([])))
    assert found["Kills of servers"][1:] == [
        "--kinds", "server", "--kills", "38", "--seed", "1"
    ]  # fmt: skip
    # in four modes, from outside and from inside
    assert 8 * 38 >= 300
    assert found["Simulated schedules"][2] == "100000"
    assert found["Whole jobs killed at once"][1:] == [
        "--mode", "sync", "async", "ssp", "geo", "--rounds", "20", "--seed", "1"
    ]  # fmt: skip
    assert found["Damaged frames"][2] == "1000000"


@pytest.mark.long
@pytest.mark.slow
def test_the_output_of_a_program_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--schedules", "20", "--only", "simulation", "--no-write"]
    assert chaos.main(small) == 0
    output = capsys.readouterr().out
    assert "## Simulated schedules" in output
    assert "no fault was found" in output
