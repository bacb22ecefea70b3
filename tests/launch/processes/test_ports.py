# SPDX-License-Identifier: Apache-2.0
"""Held ports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from tests.launch.workplace import free_ports

from fleetlight.errors import LaunchError
from fleetlight.launch.processes.ports import Reservation, listen, listener, reserve

HOST = "127.0.0.1"
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's bind")


@pytest.fixture
def taken() -> contextlib.closing[socket.socket]:
    return contextlib.closing(socket.create_server((HOST, 0)))


@LINUX_ONLY
def test_a_reserved_port_is_given_to_nobody_else() -> None:
    with contextlib.closing(Reservation(HOST)) as held:
        others = [Reservation(HOST) for _ in range(200)]
        assert held.port not in {other.port for other in others}
        for other in others:
            other.close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, held.port))


@LINUX_ONLY
def test_a_child_may_listen_on_a_reserved_port() -> None:
    with contextlib.closing(Reservation(HOST)) as held:
        held.hand_over()
        with (
            socket.create_server((HOST, held.port)) as server,
            socket.create_connection((HOST, held.port)) as client,
        ):
            accepted, _ = server.accept()
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
            accepted.close()


def test_fixed_ports_follow_each_other() -> None:
    start = free_ports((HOST,), 3)
    held = reserve(HOST, 3, start)
    assert [one.port for one in held] == [start, start + 1, start + 2]
    for one in held:
        one.close()


@LINUX_ONLY
def test_a_taken_port_names_its_owner(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .* by process {os.getpid()} ") as told:
            reserve(HOST, 1, port)
    assert str(told.value).endswith("end that process or choose another --start_port")


@LINUX_ONLY
def test_the_reservation_of_another_launcher_counts_as_taken() -> None:
    held = Reservation(HOST)
    with pytest.raises(LaunchError, match="another fleetrun may hold it"):
        reserve(HOST, 1, held.port)
    held.close()


@LINUX_ONLY
def test_what_an_ended_run_left_in_time_wait_is_free() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first, so its end stays in TIME_WAIT
        client.close()
    with contextlib.closing(Reservation(HOST, port)) as held:
        assert held.port == port


@LINUX_ONLY
def test_who_listens(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        port = server.getsockname()[1]
        assert listener(port).startswith(f"process {os.getpid()} (")
    assert listener(port) == ""


@LINUX_ONLY
def test_who_listens_is_found_behind_a_descriptor_that_is_gone() -> None:
    below = os.open(os.devnull, os.O_RDONLY)
    with socket.create_server((HOST, 0)) as taken:
        os.close(below)  # where our descriptors will be listed through, which then goes
        assert listener(taken.getsockname()[1]).startswith(f"process {os.getpid()} ")


@LINUX_ONLY
def test_a_command_of_several_lines_is_told_in_one() -> None:
    code = "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s:\n"
    code += " print(s.getsockname()[1], flush=True)\n input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        told = listener(int(child.stdout.readline()))
        child.communicate(b"\n", timeout=60)
    assert told.startswith(f"process {child.pid} ({sys.executable} -c import socket with ")


def test_ports_must_exist() -> None:
    with pytest.raises(LaunchError, match="up to 65536, expected at most 65535"):
        reserve(HOST, 3, 65534)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(LaunchError, match="not an address of this machine"):
        Reservation("203.0.113.1")


def test_listening_where_somebody_listens(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        assert listen(HOST, server.getsockname()[1]) is None
    with contextlib.closing(Reservation(HOST)) as held:
        port = held.port
    listener = listen(HOST, port)
    assert listener is not None
    listener.close()
