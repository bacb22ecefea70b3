# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of launchers, without torch."""

import socket

import pytest
from tests.launch.machines.doubles import RecordingScreen, Store

from fleetlight.errors import LaunchError, MembershipError
from fleetlight.launch.job.layout import Node
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines.connected_machines import RendezvousThread, exchange, reach
from fleetlight.launch.machines.exchanged.heartbeats import Heartbeats
from fleetlight.launch.machines.start_deadline import StartDeadline
from fleetlight.launch.processes.interrupts import Interrupts

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
