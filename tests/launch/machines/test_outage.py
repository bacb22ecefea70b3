# SPDX-License-Identifier: Apache-2.0
"""How long a launcher waits for an unreachable machine."""

import signal
from collections.abc import Callable

import pytest
from tests.launch.machines.doubles import RecordingScreen

from fleetlight.launch.machines import connected_machines
from fleetlight.launch.machines.connected_machines import Outage, OutOfReachError, SilenceReport
from fleetlight.launch.machines.store_connection import StoreGoneError
from fleetlight.launch.processes.interrupts import Interrupts


class Clock:
    """Time that passes only during sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Case:
    """An outage of 60 s at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.screen, self.interrupts = Clock(), RecordingScreen(), Interrupts()
        self.attempts = 0
        self.outage = Outage("node 0", 60.0, self.screen, self.interrupts)
        monkeypatch.setattr(connected_machines, "time", self.clock)

    def cut_until(self, end: float) -> Callable[[], int]:
        """A call that fails until a time, then returns the number of attempts."""

        def attempt() -> int:
            self.attempts += 1
            if self.clock.now < end:
                raise RuntimeError("connection timed out")
            return self.attempts

        return attempt


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(monkeypatch)


def test_outage_shorter_than_the_deadline_is_survived(case: Case) -> None:
    assert case.outage.outlast(case.cut_until(59.0)) == case.attempts
    assert case.screen.lines == [
        "node 0 is unreachable; waiting up to 60 s for it (--deadline_s)",
        "node 0 is back after 59 s",
    ]
    # the next outage has the full deadline again
    case.outage.outlast(case.cut_until(110.0))


def test_brief_break_of_a_connection_is_not_reported(case: Case) -> None:
    assert case.outage.outlast(case.cut_until(0.1)) == 2
    assert case.screen.lines == []


def test_outage_longer_than_the_deadline_is_an_error(case: Case) -> None:
    with pytest.raises(RuntimeError, match="connection timed out"):
        case.outage.outlast(case.cut_until(61.5))
    assert 60.0 <= case.clock.now < 61.0


def test_single_attempts_share_the_deadline(case: Case) -> None:
    attempt = case.cut_until(1000.0)
    while case.clock.now < 60.0:
        with pytest.raises(OutOfReachError, match="timed out"), case.outage.single_attempt():
            case.outage.outlast(attempt)
        case.clock.sleep(1.0)
    assert case.attempts == 60
    with pytest.raises(RuntimeError) as error, case.outage.single_attempt():
        case.outage.outlast(attempt)
    assert error.type is RuntimeError


def test_departed_launchers_do_not_delay_the_store(case: Case) -> None:
    def gone() -> None:
        raise StoreGoneError("no process listens")

    with pytest.raises(StoreGoneError):
        case.outage.outlast(gone)
    assert case.clock.now == 0.0


def test_only_another_interrupt_ends_the_wait(case: Case) -> None:
    case.interrupts.seen.append(signal.SIGINT)
    attempt = case.cut_until(50.0)

    def interrupted() -> int:
        if case.clock.now > 10.0:
            case.interrupts.seen.append(signal.SIGINT)
        return attempt()

    with pytest.raises(RuntimeError, match="timed out"):
        case.outage.outlast(interrupted)
    assert 10.0 < case.clock.now < 11.0


def test_each_outage_is_reported_once() -> None:
    screen = RecordingScreen()
    silences = SilenceReport(300.0, screen)
    for silent in ({}, {"node 1": 8.0}, {"node 1": 9.4}, {"node 2": 8.0}):
        silences.tell(silent)
    waiting = "sends no heartbeats; waiting up to 300 s for it (--deadline_s)"
    assert screen.lines == [f"node 1 {waiting}", f"node 2 {waiting}", "node 1 is back after 9 s"]
