# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of doctors: complete, with an absent machine, with a machine that leaves."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tests.launch.doctor.doctors import HOSTS, exam_options, facts

from fleetlight.errors import LaunchError
from fleetlight.launch.doctor import joint_examination
from fleetlight.launch.doctor.joint_examination import DoctorService
from fleetlight.launch.doctor.messages import Exam, ExamOptions


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
    listener = socket.create_server((HOSTS[1], of.port))
    service = DoctorService(listener, other, 1, facts(other))
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
    listener = socket.create_server((HOSTS[1], of.port))
    service = DoctorService(listener, of, 1, facts(of))
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
