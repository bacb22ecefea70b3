# SPDX-License-Identifier: Apache-2.0
"""Reserved ports."""

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
def test_reserved_port_is_given_to_no_other_process() -> None:
    with contextlib.closing(Reservation(HOST)) as held:
        others = [Reservation(HOST) for _ in range(200)]
        assert held.port not in {other.port for other in others}
        for other in others:
            other.close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, held.port))


@LINUX_ONLY
def test_child_may_listen_on_a_reserved_port() -> None:
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


def test_fixed_ports_are_consecutive() -> None:
    start = free_ports((HOST,), 3)
    held = reserve(HOST, 3, start)
    assert [one.port for one in held] == [start, start + 1, start + 2]
    for one in held:
        one.close()


@LINUX_ONLY
def test_error_for_a_port_in_use_names_its_owner(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        port = server.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"port {port} .* by process {os.getpid()} "
        ) as caught:
            reserve(HOST, 1, port)
    assert str(caught.value).endswith("end that process or choose another --start_port")


@LINUX_ONLY
def test_reservation_of_another_launcher_counts_as_in_use() -> None:
    held = Reservation(HOST)
    with pytest.raises(LaunchError, match="another fleetrun may hold it"):
        reserve(HOST, 1, held.port)
    held.close()


@LINUX_ONLY
def test_port_in_time_wait_is_free() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first, so its end stays in TIME_WAIT
        client.close()
    with contextlib.closing(Reservation(HOST, port)) as held:
        assert held.port == port


@LINUX_ONLY
def test_listener_is_named(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        port = server.getsockname()[1]
        assert listener(port).startswith(f"process {os.getpid()} (")
    assert listener(port) == ""


@LINUX_ONLY
def test_listener_is_found_after_a_descriptor_closes() -> None:
    below = os.open(os.devnull, os.O_RDONLY)
    with socket.create_server((HOST, 0)) as taken:
        os.close(below)  # the descriptor of the listing itself, which then closes
        assert listener(taken.getsockname()[1]).startswith(f"process {os.getpid()} ")


@LINUX_ONLY
def test_command_of_several_lines_is_shown_in_one() -> None:
    code = "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s:\n"
    code += " print(s.getsockname()[1], flush=True)\n input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        owner = listener(int(child.stdout.readline()))
        child.communicate(b"\n", timeout=60)
    assert owner.startswith(f"process {child.pid} ({sys.executable} -c import socket with ")


def test_invalid_ports_are_refused() -> None:
    with pytest.raises(LaunchError, match="up to 65536, expected at most 65535"):
        reserve(HOST, 3, 65534)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match="not an address of this machine"):
        Reservation("203.0.113.1")


def test_listening_on_a_taken_port_returns_none(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        assert listen(HOST, server.getsockname()[1]) is None
    with contextlib.closing(Reservation(HOST)) as held:
        port = held.port
    listener = listen(HOST, port)
    assert listener is not None
    listener.close()
