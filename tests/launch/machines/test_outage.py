# SPDX-License-Identifier: Apache-2.0
"""How long a launcher waits for an unreachable machine."""

import dataclasses
import signal
import socket
from collections.abc import Callable

import pytest
from tests.launch.machines.doubles import RecordingScreen, Store

from fleetlight.errors import LaunchError, MembershipError
from fleetlight.launch.job.layout import Node
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines import connected_machines, start_deadline
from fleetlight.launch.machines.connected_machines import (
    Outage,
    OutOfReachError,
    RendezvousThread,
    SilenceReport,
    exchange,
    reach,
)
from fleetlight.launch.machines.exchanged.heartbeats import Heartbeats
from fleetlight.launch.machines.start_deadline import StartDeadline, describe_missing
from fleetlight.launch.machines.store_connection import StoreGoneError
from fleetlight.launch.processes.interrupts import Interrupted, Interrupts


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


# -- the rendezvous of launchers, without torch


LISTED = RendezvousSpec(
    master=("10.0.0.1", 6170), min_nodes=2, max_nodes=2, hosts=("10.0.0.1", "10.0.0.2")
)


def test_rendezvous_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = RendezvousSpec(
            master=taken.getsockname(), min_nodes=2, max_nodes=2, rank=0, is_master=True
        )
        with pytest.raises(
            LaunchError, match="the rendezvous of the machines, is taken by process"
        ):
            reach(spec, StartDeadline(RecordingScreen(), Interrupts(), deadline_s=60))


class FixedRendezvous:
    """A rendezvous that returns or raises a fixed result."""

    def __init__(self, result: object) -> None:
        self._result = result

    def next_round(self) -> object:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def test_rendezvous_in_a_thread() -> None:
    meet = RendezvousThread(FixedRendezvous(("round.0", 1, 2)))  # type: ignore[arg-type]
    StartDeadline(RecordingScreen(), Interrupts(), deadline_s=60).wait(meet.is_done, lambda: "")
    assert meet.found == ("round.0", 1, 2)
    meet = RendezvousThread(FixedRendezvous(MembershipError("closed")))  # type: ignore[arg-type]
    with pytest.raises(MembershipError, match="closed"):
        StartDeadline(RecordingScreen(), Interrupts(), deadline_s=60).wait(meet.is_done, lambda: "")


def test_all_launchers_compute_the_same_layout() -> None:
    store, shared = Store(), Store()
    heartbeats = [Heartbeats(store, host, now=0) for host in ("10.0.0.2", "10.0.0.1")]
    nodes = [
        Node(host=host, workers=((host, 1),), noted=(("script", host),))
        for host in ("10.0.0.2", "10.0.0.1")
    ]
    for number in (0, 1, 0):  # the first launcher must wait for the second
        try:
            layout, launchers, warnings = exchange(
                nodes[number],
                (shared, number, 2),
                heartbeats[number],
                LISTED,
                StartDeadline(RecordingScreen(), Interrupts(), deadline_s=0.01),
            )
        except MembershipError:
            assert number == 0
            continue
        assert [node.host for node in layout.nodes] == ["10.0.0.1", "10.0.0.2"]
        assert layout.own == 1 - number
        assert launchers == (2, 1)
        assert "the script differs between the machines" in warnings[0]


# -- how launchers wait for each other at the start


ELASTIC = RendezvousSpec(master=("10.0.0.1", 6170), min_nodes=2, max_nodes=3)


def test_missing_listed_machines_are_named_by_address() -> None:
    assert describe_missing(LISTED, ["10.0.0.1"]) == "not ready endpoints: ['10.0.0.2:6170']"


def test_missing_unlisted_machines_are_counted() -> None:
    assert describe_missing(ELASTIC, ["a"]) == "waiting for 1 of 2 machines (connected: a)"
    assert (
        describe_missing(ELASTIC, ["b", "a"])
        == "enough machines are connected (a, b); up to 3 may join"
    )


def test_all_machines_connected_but_not_ready() -> None:
    both = "all machines are connected (10.0.0.1, 10.0.0.2), but not all are ready to start"
    assert describe_missing(LISTED, ["10.0.0.2", "10.0.0.1"]) == both
    assert describe_missing(dataclasses.replace(LISTED, hosts=()), ["10.0.0.1", "10.0.0.2"]) == both


def test_deadline_error_names_missing_machines() -> None:
    short = StartDeadline(RecordingScreen(), Interrupts(), deadline_s=0.01)
    with pytest.raises(
        MembershipError, match=r"within 0.01 s .*: launcher 1; start the same command"
    ):
        short.wait(lambda: False, lambda: "launcher 1")


def test_remaining_time_of_the_deadline() -> None:
    assert 59 < StartDeadline(RecordingScreen(), Interrupts(), deadline_s=60).left_s <= 60
    assert StartDeadline(RecordingScreen(), Interrupts(), deadline_s=0).left_s == 0


def test_waiting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_deadline, "TELL_S", 0.0)
    screen = RecordingScreen()
    answers = iter([False, False, True])
    StartDeadline(screen, Interrupts(), deadline_s=60).wait(
        lambda: next(answers), lambda: "launcher 1"
    )
    assert screen.lines == ["launcher 1", "launcher 1"]


def test_waiting_can_be_interrupted() -> None:
    interrupts = Interrupts()
    interrupts.seen.append(signal.SIGINT)
    with pytest.raises(Interrupted):
        StartDeadline(RecordingScreen(), interrupts, deadline_s=60).wait(lambda: False, lambda: "")
