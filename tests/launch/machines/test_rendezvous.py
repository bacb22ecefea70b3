# SPDX-License-Identifier: Apache-2.0
"""How launchers come together, without torch."""

from __future__ import annotations

import socket

import pytest
from tests.launch.machines.doubles import Ears, Store

from fleetlight.errors import LaunchError, MembershipError
from fleetlight.launch.job.layout import Node
from fleetlight.launch.job.spec import Meeting
from fleetlight.launch.machines.heartbeats import Heartbeats
from fleetlight.launch.machines.rendezvous import RendezvousThread, exchange, reach
from fleetlight.launch.machines.start_deadline import StartDeadline
from fleetlight.launch.processes.interrupts import Interrupts

LISTED = Meeting(
    master=("10.0.0.1", 6170), min_nodes=2, max_nodes=2, hosts=("10.0.0.1", "10.0.0.2")
)


def test_a_meeting_port_that_somebody_else_uses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meeting = Meeting(
            master=taken.getsockname(), min_nodes=2, max_nodes=2, rank=0, is_master=True
        )
        with pytest.raises(LaunchError, match="at which the machines meet, is taken by process"):
            reach(meeting, StartDeadline(Ears(), Interrupts(), deadline_s=60))


class Rounds:
    """A rendezvous that answers, or fails."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def next_round(self) -> object:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_a_rendezvous_beside_the_loop() -> None:
    meet = RendezvousThread(Rounds(("round.0", 1, 2)))  # type: ignore[arg-type]
    StartDeadline(Ears(), Interrupts(), deadline_s=60).wait(meet.is_done, lambda: "")
    assert meet.found == ("round.0", 1, 2)
    meet = RendezvousThread(Rounds(MembershipError("closed")))  # type: ignore[arg-type]
    with pytest.raises(MembershipError, match="closed"):
        StartDeadline(Ears(), Interrupts(), deadline_s=60).wait(meet.is_done, lambda: "")


def test_everybody_comes_to_the_same_layout() -> None:
    store, shared = Store(), Store()
    heartbeats = [Heartbeats(store, host, now=0) for host in ("10.0.0.2", "10.0.0.1")]
    nodes = [
        Node(host=host, workers=((host, 1),), noted=(("script", host),))
        for host in ("10.0.0.2", "10.0.0.1")
    ]
    for number in (0, 1, 0):  # the first one has to wait for the second
        try:
            layout, launchers, warnings = exchange(
                nodes[number],
                (shared, number, 2),
                heartbeats[number],
                LISTED,
                StartDeadline(Ears(), Interrupts(), deadline_s=0.01),
            )
        except MembershipError:
            assert number == 0
            continue
        assert [node.host for node in layout.nodes] == ["10.0.0.1", "10.0.0.2"]
        assert layout.own == 1 - number
        assert launchers == (2, 1)
        assert "the script differs between the machines" in warnings[0]
