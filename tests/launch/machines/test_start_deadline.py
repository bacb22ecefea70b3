# SPDX-License-Identifier: Apache-2.0
"""How launchers wait for each other at the start."""

import dataclasses
import signal

import pytest
from tests.launch.machines.doubles import RecordingScreen

from fleetlight.errors import MembershipError
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines import start_deadline
from fleetlight.launch.machines.start_deadline import StartDeadline, describe_missing
from fleetlight.launch.processes.interrupts import Interrupted, Interrupts

LISTED = RendezvousSpec(
    master=("10.0.0.1", 6170), min_nodes=2, max_nodes=2, hosts=("10.0.0.1", "10.0.0.2")
)
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
