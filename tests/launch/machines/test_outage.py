# SPDX-License-Identifier: Apache-2.0
"""How long a machine is waited for that is out of reach."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from tests.launch.machines.doubles import Ears

from fleetlight.launch.machines import outage
from fleetlight.launch.machines.outage import Outage, OutOfReachError, SilenceReport
from fleetlight.launch.machines.store_connection import StoreGoneError
from fleetlight.launch.processes.interrupts import Interrupts


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Case:
    """An outage of 60 s at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.ears, self.interrupts = Clock(), Ears(), Interrupts()
        self.attempts = 0
        self.outage = Outage("node 0", 60.0, self.ears, self.interrupts)
        monkeypatch.setattr(outage, "time", self.clock)

    def cut_until(self, end: float) -> Callable[[], int]:
        """Something that fails up to a time, and then tells how often it was tried."""

        def attempt() -> int:
            self.attempts += 1
            if self.clock.now < end:
                raise RuntimeError("connection timed out")
            return self.attempts

        return attempt


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(monkeypatch)


def test_a_cut_that_ends_before_the_deadline_is_outlasted(case: Case) -> None:
    assert case.outage.outlast(case.cut_until(59.0)) == case.attempts
    assert case.ears.heard == [
        "node 0 is unreachable; waiting up to 60 s for it (--deadline_s)",
        "node 0 is back after 59 s",
    ]
    # and the next one has all of the time again
    case.outage.outlast(case.cut_until(110.0))


def test_a_connection_that_only_broke_is_not_worth_a_line(case: Case) -> None:
    assert case.outage.outlast(case.cut_until(0.1)) == 2
    assert case.ears.heard == []


def test_a_cut_that_lasts_longer_than_the_deadline_is_an_error(case: Case) -> None:
    with pytest.raises(RuntimeError, match="connection timed out"):
        case.outage.outlast(case.cut_until(61.5))
    assert 60.0 <= case.clock.now < 61.0


def test_single_attempts_have_the_same_deadline(case: Case) -> None:
    attempt = case.cut_until(1000.0)
    while case.clock.now < 60.0:
        with pytest.raises(OutOfReachError, match="timed out"), case.outage.single_attempt():
            case.outage.outlast(attempt)
        case.clock.sleep(1.0)
    assert case.attempts == 60
    with pytest.raises(RuntimeError) as error, case.outage.single_attempt():
        case.outage.outlast(attempt)
    assert error.type is RuntimeError


def test_whoever_has_gone_is_not_waited_for(case: Case) -> None:
    def gone() -> None:
        raise StoreGoneError("no process listens")

    with pytest.raises(StoreGoneError):
        case.outage.outlast(gone)
    assert case.clock.now == 0.0


def test_only_a_further_interrupt_ends_the_wait(case: Case) -> None:
    case.interrupts.seen.append(signal.SIGINT)
    attempt = case.cut_until(50.0)

    def interrupted() -> int:
        if case.clock.now > 10.0:
            case.interrupts.seen.append(signal.SIGINT)
        return attempt()

    with pytest.raises(RuntimeError, match="timed out"):
        case.outage.outlast(interrupted)
    assert 10.0 < case.clock.now < 11.0


def test_each_machine_that_falls_silent_or_is_back_gets_one_line() -> None:
    ears = Ears()
    silences = SilenceReport(300.0, ears)
    for silent in ({}, {"node 1": 8.0}, {"node 1": 9.4}, {"node 2": 8.0}):
        silences.tell(silent)
    waiting = "sends no heartbeats; waiting up to 300 s for it (--deadline_s)"
    assert ears.heard == [f"node 1 {waiting}", f"node 2 {waiting}", "node 1 is back after 9 s"]
