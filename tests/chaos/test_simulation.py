# SPDX-License-Identifier: Apache-2.0
"""Some of the hundred thousand schedules of `make chaos`, and tests that they find bugs."""

from __future__ import annotations

import re

import pytest
from tests.chaos.simulation.planted import PLANTED, planted
from tests.chaos.simulation.running import SimulationError, main, simulate

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
#: schedules within which a bug is found
ENOUGH = 4000


def test_nothing_is_lost_or_doubled_whatever_happens() -> None:
    ran = simulate(seed=5, numbers=range(2000))
    assert ran.total() == 2000
    assert min(ran.values()) > 50


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_is_found(name: str) -> None:
    with planted(name), pytest.raises(SimulationError) as found:
        simulate(seed=7, numbers=range(ENOUGH))
    told = str(found.value)
    # found by what it breaks, and not because the planted code fails
    promise = re.search(r"^Violation: '(\w+)', ", told, re.MULTILINE)
    assert promise is not None
    assert promise[1] != "foreseen"
    number = re.search(r"--seed 7 --only (\d+)$", told)
    assert number is not None
    # found again by the printed command line
    with planted(name), pytest.raises(SimulationError) as again:
        simulate(seed=7, numbers=[int(number[1])])
    assert str(again.value) == told
    # it was the bug
    simulate(seed=7, numbers=[int(number[1])])


def test_the_program_says_how_many_there_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "40", "--seed", "2"]) == 0
    assert re.fullmatch(
        r"simulation, seed 2: 40 schedules \(.*\) in \d+ s, \d+ a second: 0 violations\n",
        capsys.readouterr().out,
    )
