# SPDX-License-Identifier: Apache-2.0
"""A doctor that is asked: what it answers, and whom."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.launch.doctor.doctors import HOSTS, asked, facts

from fleetlight.errors import FleetError, ProtocolError
from fleetlight.launch.doctor import probe
from fleetlight.launch.doctor import service as service_module
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Echo,
    Exam,
    Facts,
    Finish,
    Link,
    Measure,
    TellFacts,
    TellTime,
    Time,
)
from fleetlight.launch.doctor.service import DoctorService

ASKED = asked(2)


@pytest.fixture
def service() -> Iterator[DoctorService]:
    """That of the second of two machines."""
    listener = socket.create_server((HOSTS[1], ASKED.port))
    made = DoctorService(listener, ASKED, 1, facts(ASKED))
    yield made
    made.close()


def wire(own: str = HOSTS[0]) -> DoctorChannel:
    return dial(HOSTS[1], ASKED.port, own, 5.0)


def test_it_tells_of_its_machine_and_measures(service: DoctorService) -> None:
    link = Link(sender=0, receiver=1)
    measured = probe.measure(HOSTS[0], HOSTS[1], ASKED.port, link, (), 0.02)
    assert measured.error == ""
    assert (measured.round_trip_s or 0) > 0
    assert (measured.bytes_per_s or 0) > 1e6
    asking = wire()
    assert asking.call(TellFacts(), Facts) == facts(ASKED)
    assert asking.call(TellTime(), Time).now == pytest.approx(time.time(), abs=5)
    assert abs(probe.clock_ahead(asking)) < 1
    assert not service.has_exam.is_set()
    exam = Exam(asked=ASKED, facts={})
    asking.call(Finish(exam), Acknowledged)
    assert service.has_exam.is_set()
    assert service.exam == exam
    asking.close()


def test_only_the_first_may_command(service: DoctorService) -> None:
    other = wire(HOSTS[1])
    assert other.call(Echo(), Acknowledged) == Acknowledged()
    for command in (Finish(Exam(asked=ASKED, facts={})), Measure(0, ())):
        with pytest.raises(ProtocolError, match=r"refused: only 127\.0\.0\.1 may request that"):
            other.call(command, Acknowledged)
    other.close()
    assert not service.was_called.is_set()
    assert not service.has_exam.is_set()


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Measure(1, ()), id="itself"),
        pytest.param(Measure(2, ()), id="nobody"),
        pytest.param(Measure(-1, ()), id="below"),
        pytest.param(Measure(0, tuple(range(1, 6))), id="many ports"),
    ],
)
def test_it_is_no_tool_to_probe_others_with(request_: Measure) -> None:
    asking = wire()
    with pytest.raises(ProtocolError, match="refused: no machine"):
        asking.call(request_, Link)
    asking.close()


def test_a_machine_outside_the_list_is_not_listened_to(service: DoctorService) -> None:
    stranger = wire(HOSTS[2])
    with pytest.raises(FleetError):
        stranger.call(TellFacts(), Facts)
    stranger.close()
    assert not service.was_called.is_set()


@pytest.mark.usefixtures("service")
def test_it_receives_no_longer_than_it_was_started_for() -> None:
    asking = wire()
    assert probe.send_for(asking, 1e9).seconds < 5
    asking.close()


@pytest.mark.usefixtures("service")
def test_connections_come_to_an_end_in_number() -> None:
    waiting = [wire() for _ in range(30)]
    for one in waiting:
        one.close()
    last = wire()
    for _ in range(100):
        # those that were turned away make room as soon as they are noticed
        try:
            assert last.call(Echo(), Acknowledged) == Acknowledged()
            break
        except FleetError:
            last.close()
            last = wire()
    else:
        pytest.fail("nobody is let in any more")
    last.close()


class _Full(socket.socket):
    """A listener of a process with too many open files, the first time."""

    asked = 0

    def accept(self) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_too_many_open_files_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return super().wait(timeout)

    listener = _Full()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOSTS[1], ASKED.port))
    listener.listen()
    monkeypatch.setattr(service_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(threading, "Event", Counted)
    service = DoctorService(listener, ASKED, 1, facts(ASKED))
    asking = wire()
    assert asking.call(Echo(), Acknowledged) == Acknowledged()
    asking.close()
    service.close()
    assert waits.count(0.01) == 1


def test_a_port_that_cannot_be_reached_is_named(service: DoctorService) -> None:
    free = ASKED.ports[0]
    with socket.create_server((HOSTS[1], free + 1)):
        closed = probe.unreachable(HOSTS[0], HOSTS[1], (free, free + 1))
    assert closed == {free: "connection refused"}
    link = Link(sender=0, receiver=1)
    gone = probe.measure(HOSTS[0], HOSTS[1], free, link, (), 0.02)
    assert gone.error == f"port {free}: connection refused"
    assert not service.has_exam.is_set()
