# SPDX-License-Identifier: Apache-2.0
"""Some of the schedules of `make chaos`, and tests that they find planted bugs."""

import re

import pytest
from tests.chaos.simulation.elastic.planted import ELASTIC
from tests.chaos.simulation.planted import PLANTED, planted
from tests.chaos.simulation.running import KINDS, SimulationError, main, simulate

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
#: schedules that suffice to find a bug
ENOUGH = 4000


@pytest.mark.long
def test_no_schedule_loses_or_doubles_an_update() -> None:
    ran = simulate(seed=5, numbers=range(2000))
    assert ran.total() == 2000
    assert min(ran.values()) > 50


@pytest.mark.parametrize("name", [*PLANTED, *ELASTIC])
def test_planted_bug_is_found(name: str) -> None:
    kinds = ["elastic"] if name in ELASTIC else [kind for kind in KINDS if kind != "elastic"]
    with planted(name), pytest.raises(SimulationError) as found:
        simulate(7, range(ENOUGH), kinds)
    report = str(found.value)
    # found by the broken promise, and not by an error of the planted code
    promise = re.search(r"^Violation: '(\w+)', ", report, re.MULTILINE)
    assert promise is not None
    assert promise[1] != "foreseen"
    number = re.search(r"--seed 7 --only (\d+)$", report)
    assert number is not None
    # the printed command line reproduces it
    with planted(name), pytest.raises(SimulationError) as again:
        simulate(7, [int(number[1])], kinds)
    assert str(again.value) == report
    # without the bug the schedule passes
    simulate(7, [int(number[1])], kinds)


@pytest.mark.long
def test_program_reports_the_number_of_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "40", "--seed", "2"]) == 0
    assert re.fullmatch(
        r"simulation, seed 2: 40 schedules \(.*\) in \d+ s, \d+ a second: 0 violations\n",
        capsys.readouterr().out,
    )
