# SPDX-License-Identifier: Apache-2.0
"""The service of a doctor: which requests it serves, and for which callers."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.launch.doctor.doctors import HOSTS, exam_options, facts

from fleetlight.errors import FleetError, ProtocolError
from fleetlight.launch.doctor import joint_examination as service_module
from fleetlight.launch.doctor import probe
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.joint_examination import DoctorService
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Echo,
    Exam,
    Facts,
    Finish,
    GetFacts,
    GetTime,
    Link,
    Measure,
    Time,
)

OPTIONS = exam_options(2)


@pytest.fixture
def service() -> Iterator[DoctorService]:
    """The service of the second of two machines."""
    listener = socket.create_server((HOSTS[1], OPTIONS.port))
    made = DoctorService(listener, OPTIONS, 1, facts(OPTIONS))
    yield made
    made.close()


def wire(own: str = HOSTS[0]) -> DoctorChannel:
    return dial(HOSTS[1], OPTIONS.port, own, 5.0)


def test_the_service_reports_facts_and_measures(service: DoctorService) -> None:
    link = Link(sender=0, receiver=1)
    measured = probe.measure(HOSTS[0], HOSTS[1], OPTIONS.port, link, (), 0.02)
    assert measured.error == ""
    assert (measured.round_trip_s or 0) > 0
    assert (measured.bytes_per_s or 0) > 0
    asking = wire()
    assert asking.call(GetFacts(), Facts) == facts(OPTIONS)
    assert asking.call(GetTime(), Time).now == pytest.approx(time.time(), abs=5)
    assert abs(probe.clock_ahead(asking)) < 1
    assert not service.has_exam.is_set()
    exam = Exam(asked=OPTIONS, facts={})
    asking.call(Finish(exam), Acknowledged)
    assert service.has_exam.is_set()
    assert service.exam == exam
    asking.close()


@pytest.mark.usefixtures("service")
def test_a_receiver_that_gets_no_time_reports_a_rate() -> None:
    asking = wire()
    assert probe.send_for(asking, 0.0).count > 0
    asking.close()


def test_only_the_first_machine_may_command(service: DoctorService) -> None:
    other = wire(HOSTS[1])
    assert other.call(Echo(), Acknowledged) == Acknowledged()
    for command in (Finish(Exam(asked=OPTIONS, facts={})), Measure(0, ())):
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
        pytest.param(Measure(2, ()), id="no machine"),
        pytest.param(Measure(-1, ()), id="below"),
        pytest.param(Measure(0, tuple(range(1, 6))), id="many ports"),
    ],
)
def test_the_service_measures_only_machines_of_the_list(request_: Measure) -> None:
    asking = wire()
    with pytest.raises(ProtocolError, match="refused: no machine"):
        asking.call(request_, Link)
    asking.close()


def test_machine_outside_the_list_is_refused(service: DoctorService) -> None:
    stranger = wire(HOSTS[2])
    with pytest.raises(FleetError):
        stranger.call(GetFacts(), Facts)
    stranger.close()
    assert not service.was_called.is_set()


@pytest.mark.usefixtures("service")
def test_receiving_is_limited_by_the_options() -> None:
    asking = wire()
    assert probe.send_for(asking, 1e9).seconds < 5
    asking.close()


@pytest.mark.usefixtures("service")
def test_number_of_connections_is_limited() -> None:
    waiting = [wire() for _ in range(30)]
    for one in waiting:
        one.close()
    last = wire()
    for _ in range(100):
        # closed connections free their places
        try:
            assert last.call(Echo(), Acknowledged) == Acknowledged()
            break
        except FleetError:
            last.close()
            last = wire()
    else:
        pytest.fail("the doctor accepts no more connections")
    last.close()


class _Full(socket.socket):
    """A listener of a process with too many open files, the first time."""

    calls = 0

    def accept(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_service_survives_too_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Counted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return super().wait(timeout)

    listener = _Full()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((HOSTS[1], OPTIONS.port))
    listener.listen()
    monkeypatch.setattr(service_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(threading, "Event", Counted)
    service = DoctorService(listener, OPTIONS, 1, facts(OPTIONS))
    asking = wire()
    assert asking.call(Echo(), Acknowledged) == Acknowledged()
    asking.close()
    service.close()
    assert waits.count(0.01) == 1


def test_unreachable_port_is_named(service: DoctorService) -> None:
    free = OPTIONS.ports[0]
    with socket.create_server((HOSTS[1], free + 1)):
        closed = probe.unreachable(HOSTS[0], HOSTS[1], (free, free + 1))
    assert closed == {free: "connection refused"}
    link = Link(sender=0, receiver=1)
    gone = probe.measure(HOSTS[0], HOSTS[1], free, link, (), 0.02)
    assert gone.error == f"port {free}: connection refused"
    assert not service.has_exam.is_set()
