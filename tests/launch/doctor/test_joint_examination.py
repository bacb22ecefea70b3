# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of doctors: complete, with an absent machine, with a machine that leaves."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tests.launch.doctor.doctors import HOSTS, exam_options, facts

from fleetlight.errors import FleetError, LaunchError, ProtocolError
from fleetlight.launch.doctor import joint_examination, probe
from fleetlight.launch.doctor import joint_examination as service_module
from fleetlight.launch.doctor.channel import DoctorChannel, dial
from fleetlight.launch.doctor.joint_examination import DoctorService
from fleetlight.launch.doctor.messages import (
    Acknowledged,
    Echo,
    Exam,
    ExamOptions,
    Facts,
    Finish,
    GetFacts,
    GetTime,
    Link,
    Measure,
    Time,
)


@pytest.fixture(autouse=True)
def no_report_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report at once, not every few seconds."""
    monkeypatch.setattr(joint_examination, "TELL_S", 0.0)


def doctors(
    of: ExamOptions, numbers: range, deadline_s: float = 20.0
) -> list[tuple[Exam, list[str]]]:
    """Run the doctors of these machines concurrently; returns their results and output."""
    lines: dict[int, list[str]] = {number: [] for number in numbers}
    with ThreadPoolExecutor() as threads:
        running: dict[int, Future[Exam]] = {
            number: threads.submit(
                joint_examination.examine_together,
                of,
                number,
                facts(of),
                deadline_s,
                lines[number].append,
            )
            for number in numbers
        }
        return [(future.result(), lines[number]) for number, future in running.items()]


def test_all_doctors_have_the_same_result() -> None:
    of = exam_options(3)
    (first, lines), *others = doctors(of, range(3))
    assert [exam for exam, _ in others] == [first, first]
    assert list(first.facts) == [0, 1, 2]
    assert (first.absent, first.uninformed) == ({}, {})
    pairs = [(link.sender, link.receiver) for link in first.links]
    assert pairs == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for link in first.links:
        assert (link.error, link.closed) == ("", {})
        assert (link.bytes_per_s or 0) > 0
    assert list(first.clocks) == [1, 2]
    assert "measuring 127.0.0.3 -> 127.0.0.2" in lines
    for number, found in first.facts.items():
        assert set(of.ports) <= set(found.listening), number
        assert len(found.listening) == len(of.ports) + 1


def test_long_measurement_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_examination, "_LONG_S", 0.0)
    (_, lines), (_, other) = doctors(exam_options(2), range(2))
    (at,) = [number for number, text in enumerate(lines) if "measuring 2 links" in text]
    assert lines[at].startswith("measuring 2 links, one after another")
    assert lines[at + 1].startswith("measuring ")
    assert not any("measuring 2 links" in text for text in other)


@pytest.mark.slow
def test_absent_machine_is_named_and_the_others_are_measured() -> None:
    of = exam_options(3)
    (first, lines), (second, _) = doctors(of, range(2), deadline_s=1.0)
    assert first == second
    assert first.absent == {2: "connection refused"}
    assert [(link.sender, link.receiver) for link in first.links] == [(0, 1), (1, 0)]
    assert f"not ready: 127.0.0.3:{of.port} (connection refused)" in lines


@pytest.mark.slow
def test_absent_first_machine_is_named_by_the_others() -> None:
    of = exam_options(2)
    ((exam, lines),) = doctors(of, range(1, 2), deadline_s=0.5)
    assert exam.absent == {0: "connection refused"}
    assert list(exam.facts) == [1]
    assert f"not ready: 127.0.0.1:{of.port} (connection refused)" in lines


@pytest.mark.slow
def test_first_machine_that_cannot_connect_is_named() -> None:
    of = exam_options(2)
    with socket.create_server((HOSTS[0], of.port)):
        ((exam, _),) = doctors(of, range(1, 2), deadline_s=0.5)
    assert exam.absent == {0: "listens, but has not called 127.0.0.2: can it reach this machine?"}


@pytest.mark.slow
def test_different_list_is_reported() -> None:
    of = exam_options(2)
    other = msgspec.structs.replace(of, hosts=(HOSTS[0], HOSTS[1], HOSTS[2]))
    service = DoctorService(socket.create_server((HOSTS[1], of.port)), other, 1, facts(other))
    ((exam, _),) = doctors(of, range(1), deadline_s=0.5)
    service.close()
    assert exam.absent == {
        1: "was started with --ips that resolve to 127.0.0.1, 127.0.0.2, 127.0.0.3"
    }


@pytest.mark.slow
def test_another_program_at_the_port_is_named() -> None:
    of = exam_options(2)
    with ThreadPoolExecutor() as threads, socket.create_server((HOSTS[1], of.port)) as listener:
        threads.submit(_serve_http, listener)
        ((exam, _),) = doctors(of, range(1), deadline_s=0.3)
    assert "announced 1213486160 bytes, expected a doctor's message" in exam.absent[1]


def _serve_http(listener: socket.socket) -> None:
    listener.settimeout(0.5)
    try:
        while True:
            connected, _ = listener.accept()
            connected.sendall(b"HTTP/1.1 400 Bad request\r\n\r\n")
            connected.recv(1000)
            connected.close()
    except OSError:
        pass


def test_links_of_a_lost_machine_are_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    of = exam_options(2)
    service = DoctorService(socket.create_server((HOSTS[1], of.port)), of, 1, facts(of))
    say: Any = lambda text: service.close() if text.startswith("measuring") else None  # noqa: E731
    exam = joint_examination.examine_together(of, 0, facts(of), 5.0, say)
    assert [link.error for link in exam.links] == [
        f"port {of.port}: connection refused",
        "connection refused",
    ]
    assert exam.uninformed == {1: "connection refused"}
    assert exam.clocks == {}


@pytest.mark.slow
def test_first_machine_that_leaves_is_named() -> None:
    of = exam_options(2)
    with ThreadPoolExecutor() as threads:
        listener = socket.create_server((HOSTS[0], of.port))
        lines: list[str] = []
        running = threads.submit(
            joint_examination.examine_together, of, 1, facts(of), 20.0, lines.append
        )
        _ask_once(of)
        listener.close()
        exam = running.result(timeout=30)
    assert exam.absent == {0: "disconnected before it sent the results"}
    assert f"127.0.0.1:{of.port} has started the examination" in lines


def _ask_once(of: ExamOptions) -> None:
    from fleetlight.launch.doctor.channel import dial
    from fleetlight.launch.doctor.messages import Facts, GetFacts

    for _ in range(1000):
        try:
            wire = dial(HOSTS[1], of.port, HOSTS[0], 5.0)
        except OSError:
            continue
        wire.call(GetFacts(), Facts)
        wire.close()
        return


def test_port_in_use_is_named() -> None:
    of = exam_options(2)
    with (
        socket.create_server((HOSTS[0], of.port)),
        pytest.raises(LaunchError, match=rf"port {of.port} on 127\.0\.0\.1, .*taken by process"),
    ):
        joint_examination.examine_together(of, 0, facts(of), 1.0, print)


OPTIONS = exam_options(2)


@pytest.fixture
def service() -> Iterator[DoctorService]:
    """The service of the second of two machines."""
    made = DoctorService(socket.create_server((HOSTS[1], OPTIONS.port)), OPTIONS, 1, facts(OPTIONS))
    yield made
    made.close()


def wire(own: str = HOSTS[0]) -> DoctorChannel:
    return dial(HOSTS[1], OPTIONS.port, own, 5.0)


def test_the_service_reports_facts_and_measures(service: DoctorService) -> None:
    measured = probe.measure(HOSTS[0], HOSTS[1], OPTIONS.port, Link(sender=0, receiver=1), (), 0.02)
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
    gone = probe.measure(HOSTS[0], HOSTS[1], free, Link(sender=0, receiver=1), (), 0.02)
    assert gone.error == f"port {free}: connection refused"
    assert not service.has_exam.is_set()
