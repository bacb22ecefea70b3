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
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.launch.doctor.doctors import HOSTS, exam_options, facts, free_ports

from fleetlight.errors import (
    ConfigError,
    DeadlineError,
    FleetError,
    LaunchError,
    PeerLostError,
    ProtocolError,
)
from fleetlight.launch.doctor import joint_examination, probe
from fleetlight.launch.doctor import joint_examination as service_module
from fleetlight.launch.doctor.channel import MAX_BYTES, DoctorChannel, dial
from fleetlight.launch.doctor.examination import DoctorOptions, examine
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
    Refused,
    Time,
)
from fleetlight.launch.inventory import Machine


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
    monkeypatch.setattr(service_module, "_ACCEPT_S", 0.01)
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


# -- from options of the command line to the result of an examination


NAMES = {"here": "127.0.1.1", "there": "192.0.2.7"}
MACHINE = Machine(
    cores=4,
    addresses=(("lo", "127.0.0.1"), ("eth0", "192.0.2.1")),
    resolve=lambda host: NAMES.get(host, host),
)


def refuse_output(text: str) -> None:
    raise AssertionError(text)


def test_examination_of_this_machine() -> None:
    result = examine(DoctorOptions(port=6170, workers=2), MACHINE, {}, refuse_output)
    assert result.is_fit
    assert "cores            4" in result.text
    assert "192.0.2.1 (eth0" in result.text


def test_list_with_one_machine() -> None:
    lines: list[str] = []
    options = DoctorOptions(ips=("127.0.0.1",), port=free_ports(3))
    result = examine(options, MACHINE, {}, lines.append)
    assert result.is_fit
    assert result.text.splitlines()[1].startswith("127.0.0.1  ")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        pytest.param({"workers": -1}, "--nproc -1: expected 1 to 1024", id="workers"),
        pytest.param({"workers": 0}, "--nproc 0: expected 1 to 1024", id="no workers"),
        pytest.param({"port": 0}, "--port 0: expected 1 to 65533", id="no port"),
        pytest.param({"port": 65535}, "--port 65535", id="last port"),
        pytest.param({"seconds": 0.0}, "--seconds 0: expected more than 0", id="no time"),
        pytest.param({"seconds": float("nan")}, "--seconds nan", id="nan"),
        pytest.param({"deadline_s": -1.0}, "--deadline_s -1", id="past"),
        pytest.param({"ips": ("a",) * 65}, "lists 65 machines, expected at most 64", id="many"),
        pytest.param({"ips": ("here", "there")}, r"here resolves to 127\.0\.1\.1", id="loopback"),
        pytest.param(
            {"ips": ("192.0.2.7", "192.0.2.8")},
            "none of .* is an address of this machine",
            id="other",
        ),
        pytest.param({"ips": ("127.0.0.1", "127.0.0.2")}, "pass --host", id="unclear"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        examine(DoctorOptions(**{"port": 6170, **options}), MACHINE, {}, refuse_output)


# -- messages of doctors over a socket, and invalid bytes


class Pair:
    """Both ends of a connection: a doctor's end, and a raw one that may send anything."""

    def __init__(self, limit_s: float = 5.0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.other = socket.create_connection(listener.getsockname())
        self.wire = DoctorChannel(listener.accept()[0], "10.0.0.2", limit_s)
        listener.close()

    def close(self) -> None:
        self.wire.close()
        self.other.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_messages_round_trip(pair: Pair) -> None:
    other = DoctorChannel(pair.other, "10.0.0.1", 5.0)
    facts = Facts(asked=ExamOptions(hosts=("a", "b")), taken={5: "why"}, listening=(1, 2))
    exam = Exam(asked=facts.asked, facts={0: facts}, absent={1: "no"}, clocks={1: 0.5})
    pair.wire.send(Finish(exam))
    pair.wire.send(Echo())
    assert [other.receive_request(), other.receive_request()] == [Finish(exam), Echo()]
    other.send(facts)
    other.send(Acknowledged())
    assert [pair.wire.receive(Facts), pair.wire.receive(Acknowledged)] == [facts, Acknowledged()]
    pair.wire.close()
    assert other.receive_request() is None


@pytest.mark.parametrize(
    ("sent", "error", "complaint"),
    [
        pytest.param(b"GET ", ProtocolError, "does another program use this port", id="length"),
        pytest.param(b"\0\0\0\2no", ProtocolError, "another version of fleetlight", id="no json"),
        pytest.param(b"\0\0\0\2{}", ProtocolError, "another version", id="no type"),
        pytest.param(b"\0\0\0\0", ProtocolError, "another version", id="empty"),
        pytest.param(b"\0\0\0\x0f" + b"[" * 15, ProtocolError, "version", id="deep"),
        pytest.param(b"\0\0\0\5ab", PeerLostError, "in the middle of a frame", id="half"),
        pytest.param(b"\0\0", PeerLostError, "in the middle", id="half a length"),
        pytest.param(b"", ProtocolError, "replied with nothing", id="nothing"),
    ],
)
def test_invalid_message_is_an_error_that_names_the_peer(
    sent: bytes, error: type[FleetError], complaint: str, pair: Pair
) -> None:
    pair.other.sendall(sent)
    pair.other.shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=complaint) as caught:
        pair.wire.receive(Acknowledged)
    assert "10.0.0.2" in str(caught.value)


def test_reply_of_another_type_is_an_error(pair: Pair) -> None:
    other = DoctorChannel(pair.other, "10.0.0.1", 5.0)
    other.send(Time(3.0))
    with pytest.raises(ProtocolError, match="replied with Time, expected Acknowledged"):
        pair.wire.receive(Acknowledged)
    other.send(Refused("only 10.0.0.1 may"))
    with pytest.raises(ProtocolError, match="refused: only"):
        pair.wire.receive(Acknowledged)


def test_every_wait_ends() -> None:
    pair = Pair(limit_s=0.05)
    with pytest.raises(DeadlineError, match=r"10\.0\.0\.2 did not reply within 0\.05 s"):
        pair.wire.call(Echo(), Acknowledged)
    pair.wire.limit_s = 0.2
    # a peer that reads nothing, and a message larger than the buffers
    exam = Exam(asked=ExamOptions(names=("x" * MAX_BYTES,) * 4), facts={})
    with pytest.raises(DeadlineError, match="accepted no message"):
        pair.wire.send(Finish(exam))
    pair.close()


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_message_or_a_fleetlight_error(sent: bytes) -> None:
    pair = Pair()
    pair.other.sendall(sent)
    pair.other.close()
    try:
        while pair.wire.receive_request() is not None:
            pass
    except FleetError:
        pass
    finally:
        pair.close()
