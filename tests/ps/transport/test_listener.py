# SPDX-License-Identifier: Apache-2.0
"""A listener and its connections, within a budget of memory."""

import contextlib
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.transport.doubles import (
    LIMIT_S,
    PULL,
    RecordingHandler,
    connected,
    listening,
    raw_client,
    read_all,
    receive_message,
)
from tests.workers import run_processes

from fleetlight.errors import ConfigError, DeadlineError, PeerLostError, PlanError, ProtocolError
from fleetlight.launch.processes.ports import Reservation
from fleetlight.ps import messages as m
from fleetlight.ps.transport import Connection, Listener, SocketChannel, connect_all, listener
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.transport.listener import bind
from fleetlight.ps.transport.memory.memory_budget import WORTH_BYTES, MemoryBudget, free_memory
from fleetlight.ps.transport.protocol import MAGIC, Prefix
from fleetlight.ps.transport.session import Session
from fleetlight.wire.descriptors import open_sockets

# Listener: bad connections are refused without an effect on other peers.


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    class Lines(list[str]):
        def __iter__(self) -> Iterator[str]:
            return iter(record.getMessage() for record in caplog.records)

        def __len__(self) -> int:
            return len(caplog.records)

    with caplog.at_level(logging.INFO, "fleetlight"):
        yield Lines()


GARBAGE = {
    "http": (b"GET / HTTP/1.0\r\n\r\n" + bytes(50), "HTTP request"),
    "short": (b"hi\n", "bytes that start with b'hi"),
    "tls": (b"\x16\x03\x01" + bytes(100), "TLS hello"),
    "version": (MAGIC + b"\x09\x00" + bytes(30), "version 9"),
    "checksum": (MAGIC + b"\x01\x00" + bytes(30), "checksum"),
    "oversized": (Prefix(10, 1 << 41).pack(), "a body of 2199023255552 bytes"),
    "large greeting": (Prefix(10, 2 << 20).pack(), "a body of 2097152 bytes; at most 65536"),
    "long greeting": (Prefix(1 << 17, 0).pack(), "a header of 131072 bytes; at most 65536"),
    "header": (Prefix(40, 0).pack() + b"\xc1" * 40, "makes no sense"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_closes_its_connection_with_one_log_line(kind: str, log_lines: list[str]) -> None:
    data, name = GARBAGE[kind]
    handler = RecordingHandler()
    with listening(handler) as server, connected(server.address) as channel:
        channel.call(PULL)
        with raw_client(server.address) as raw:
            raw.sendall(data)
            reply = receive_message(raw)
            assert isinstance(reply, m.Failure)
            assert name in reply.text
            read_all(raw)
        assert channel.call(PULL).message == m.Pulled(1, 1)
    (line,) = log_lines
    assert line.startswith("closed a connection: 127.0.0.1:")
    assert name in line
    # clients without a greeting never reach the handler
    assert handler.seen == [PULL, PULL]
    assert handler.ends == [None]


@pytest.mark.slow
def test_garbage_from_a_known_peer_closes_only_its_connection() -> None:
    handler = RecordingHandler()
    with listening(handler) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        channel._frames.wire._socket.sendall(b"rubbish that is longer than a prefix")
        assert handler.ended.wait(LIMIT_S)
        assert "expected a Fleetlight frame" in str(handler.ends[0])
        with pytest.raises(ProtocolError, match=r"server 0 .* expected a Fleetlight frame"):
            channel.call(PULL)
        assert channel.call(PULL).message == m.Pulled(1, 1), "over a new connection"


@pytest.mark.parametrize("start", [b"", MAGIC[:2], Prefix(100, 0).pack()])
def test_a_silent_or_partial_start_is_dropped(start: bytes, log_lines: list[str]) -> None:
    with listening(RecordingHandler(), first_s=0.2) as server, raw_client(server.address) as raw:
        raw.sendall(start)
        assert read_all(raw) == b""
    (line,) = log_lines
    assert re.search(r"was silent for \d+\.\d s", line)


def test_a_very_slow_start_is_dropped(log_lines: list[str]) -> None:
    """Single bytes do not extend the time for the first frame."""
    with listening(RecordingHandler(), first_s=0.3) as server, raw_client(server.address) as raw:
        raw.settimeout(0.05)
        data, sent = Prefix(1 << 20, 0).pack() + bytes(1 << 20), 0
        while sent < 1000 and still_open(raw):
            raw.send(data[sent : sent + 1])
            sent += 1
        assert sent < 1000
    assert "was silent" in next(iter(log_lines))


def still_open(raw: socket.socket) -> bool:
    """Wait briefly for the other side to close the connection."""
    try:
        return raw.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_a_worker_that_computes_for_long_is_not_dropped() -> None:
    """The limits apply to first frames and partial frames, not to pauses between frames."""
    with (
        listening(RecordingHandler(), first_s=0.1, silence_s=0.1) as server,
        connected(server.address) as channel,
    ):
        channel.call(PULL)
        with raw_client(server.address) as raw:
            read_all(raw)  # takes longer than both limits
        assert channel.call(PULL).message == m.Pulled(1, 1)


def test_a_peer_that_stops_in_the_middle_of_a_frame_is_dropped() -> None:
    handler = RecordingHandler()
    with listening(handler, silence_s=0.2) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        channel._frames.wire._socket.sendall(Prefix(100, 0).pack() + b"x")
        assert handler.ended.wait(LIMIT_S)
        assert isinstance(handler.ends[0], DeadlineError)


def test_the_handler_learns_how_a_connection_ended() -> None:
    handler = RecordingHandler()
    with listening(handler) as server:
        with connected(server.address) as channel:
            channel.call(m.Leave())
        assert handler.ended.wait(LIMIT_S)
        handler.ended.clear()
        with connected(server.address) as channel:
            channel.call(PULL)
            assert channel._frames is not None
            channel._frames.wire._socket.sendall(MAGIC)
        assert handler.ended.wait(LIMIT_S)
    assert handler.ends[0] is None
    assert isinstance(handler.ends[1], PeerLostError)


def test_the_handler_can_close_and_annotate_a_connection() -> None:
    handler = RecordingHandler()

    def annotate_and_close(connection: Connection) -> None:
        connection.note = "worker 3"
        connection.close()

    handler.on_ask = annotate_and_close
    with listening(handler) as server, connected(server.address, retry=RetryPolicy(0)) as channel:
        with pytest.raises(PeerLostError):
            channel.call(m.MetricsRequest())
        assert handler.ended.wait(LIMIT_S)
    assert handler.connections[0].note == "worker 3"


def test_errors_of_a_handler_reach_the_client_and_the_log(log_lines: list[str]) -> None:
    handler = RecordingHandler()
    with listening(handler) as server, connected(server.address) as channel:
        handler.error = ZeroDivisionError("in the table")
        with pytest.raises(Exception, match="ZeroDivisionError: in the table") as caught:
            channel.call(m.Heartbeat(1))
        assert type(caught.value).__name__ == "PeerError"
        with pytest.raises(PlanError, match="complex64"):
            channel.call(m.FetchDense())
        assert channel.call(PULL).message == m.Pulled(1, 1)
    (line,) = log_lines
    assert line.startswith("heartbeat of 127.0.0.1:")


def test_the_number_of_connections_is_bounded(log_lines: list[str]) -> None:
    with (
        listening(RecordingHandler(), connections=2) as server,
        connected(server.address) as first,
        connected(server.address) as second,
    ):
        assert first.call(PULL).message == second.call(PULL).message
        with raw_client(server.address) as raw:
            assert receive_message(raw) == turned_away("there are 2 connections already")
        assert first.call(PULL).message == m.Pulled(1, 1)
    (line,) = log_lines
    assert "was refused: there are 2 connections already" in line


def turned_away(why: str) -> m.Failure:
    return m.Failure("PeerLostError", f"refused: {why}")


def test_unauthenticated_connections_have_their_own_limit(log_lines: list[str]) -> None:
    limits = {"unauthenticated": 2, "unauthenticated_s": 60.0}
    with listening(RecordingHandler(), **limits) as server, contextlib.ExitStack() as held:
        known = [held.enter_context(connected(server.address)) for _ in range(3)]
        for channel in known:
            channel.call(PULL)
        for _ in range(2):
            held.enter_context(raw_client(server.address))
        with raw_client(server.address) as raw:
            assert receive_message(raw) == turned_away("2 other clients have not authenticated yet")
        assert known[0].call(PULL).message == m.Pulled(1, 1)
    assert "was refused: 2 other clients have not authenticated yet" in next(iter(log_lines))


def test_a_silent_client_is_replaced_by_the_next_one() -> None:
    with (
        listening(RecordingHandler(), unauthenticated=1, unauthenticated_s=0.0) as server,
        raw_client(server.address) as silent,
        connected(server.address) as channel,
    ):
        assert channel.call(PULL).message == m.Pulled(1, 1)
        assert read_all(silent) == b""


def test_a_refused_client_connects_when_a_place_is_free() -> None:
    """A worker retries, and raises the reason only at its deadline."""
    with listening(RecordingHandler(), connections=1) as server, connected(server.address) as first:
        first.call(PULL)
        late = SocketChannel(
            lambda: server.address, "server 0", deadline_s=LIMIT_S, greeting=lambda: PULL
        )
        with pytest.raises(DeadlineError, match="refused: there are 1 connections already"):
            connect_all([late], 0.3)
        first.close()
        connect_all([late], LIMIT_S)
        assert late.call(PULL).message == m.Pulled(1, 1)
        late.close()


def test_a_body_larger_than_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "free_memory", lambda: 3 << 20)
    with (
        listening(RecordingHandler()) as server,
        connected(server.address) as greedy,
        connected(server.address) as other,
    ):
        greedy.call(PULL)
        other.call(PULL)
        with pytest.raises(ProtocolError, match=r"a body of 4194304 bytes, but only 3145728 bytes"):
            greedy.call(PULL, [np.zeros(4 << 20, np.uint8)])
        assert len(other.call(PULL, [np.zeros(2 << 20, np.uint8)]).arrays[0]) == 2 << 20


def test_many_connections_work_at_once() -> None:
    def work(number: int, channel: SocketChannel) -> bool:
        arrays = [np.full(1000, number)]
        return all((channel.call(PULL, arrays).arrays[0] == number).all() for _ in range(20))

    with listening(RecordingHandler()) as server, ThreadPoolExecutor(40) as pool:
        channels = [
            SocketChannel.connect(server.address, "server 0", deadline_s=LIMIT_S) for _ in range(40)
        ]
        assert all(pool.map(work, range(40), channels))
        for channel in channels:
            channel.close()


def busy_handler(started: threading.Event, release: threading.Event) -> RecordingHandler:
    handler = RecordingHandler()

    def busy(connection: Connection) -> None:
        started.set()
        release.wait(LIMIT_S)

    handler.on_ask = busy
    return handler


def test_stop_closes_everything_and_can_be_repeated() -> None:
    started = threading.Event()
    release = threading.Event()
    handler = busy_handler(started, release)
    with listening(handler) as server:
        idle, asking = (
            SocketChannel.connect(server.address, "s", deadline_s=LIMIT_S, retry=RetryPolicy(0))
            for _ in range(2)
        )
        idle.call(PULL)
        asking.send(m.MetricsRequest())
        assert started.wait(LIMIT_S)
        release.set()
        server.stop()
        server.stop()
        # the handler may or may not have replied before the stop
        with contextlib.suppress(PeerLostError):
            asking.receive()
        asking.close()
        with pytest.raises(PeerLostError):
            idle.call(PULL)
        with pytest.raises(ConnectionRefusedError):
            raw_client(server.address)


def test_a_handler_may_stop_its_own_server() -> None:
    handler = RecordingHandler()
    with listening(handler) as server, connected(server.address, retry=RetryPolicy(0)) as channel:
        handler.on_ask = lambda connection: server.stop()
        with pytest.raises(PeerLostError):
            channel.call(m.MetricsRequest())


def test_stop_still_sends_a_reply_in_progress() -> None:
    handler = RecordingHandler()
    with listening(handler) as server, connected(server.address, retry=RetryPolicy(0)) as channel:
        stopping = threading.Thread(target=server.stop)

        def stop_meanwhile(connection: Connection) -> None:
            (session,) = server._sessions
            stopping.start()
            # the incoming side is shut down first
            assert session._accepted.recv(1, socket.MSG_PEEK) == b""

        handler.on_ask = stop_meanwhile
        assert channel.call(m.MetricsRequest()).message == m.Done()
        stopping.join(LIMIT_S)


def test_stop_waits_for_a_handler_only_so_long(log_lines: list[str]) -> None:
    release, started = threading.Event(), threading.Event()
    handler = busy_handler(started, release)
    with listening(handler) as server, connected(server.address) as channel:
        channel.send(m.MetricsRequest())
        assert started.wait(LIMIT_S)
        server.stop(within_s=0.1)
        assert "is still busy after 0.1 s" in next(iter(log_lines))
        release.set()
        assert handler.ended.wait(LIMIT_S)


def test_a_server_takes_over_the_port_reserved_by_the_launcher() -> None:
    held = Reservation("127.0.0.1")
    server = Listener(("127.0.0.1", held.port), RecordingHandler())
    try:
        assert server.address == ("127.0.0.1", held.port)
        with connected(server.address) as channel:
            assert channel.call(m.Leave()).message == m.Done()
    finally:
        server.stop()
        held.close()


def test_the_port_is_known_before_the_server_listens() -> None:
    held = bind(("127.0.0.1", 0))
    endpoint = held.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(endpoint, timeout=LIMIT_S)
    server = Listener(endpoint, RecordingHandler(), held=held)
    try:
        assert server.address == endpoint
        with connected(server.address) as channel:
            assert channel.call(m.Leave()).message == m.Done()
    finally:
        server.stop()


def test_a_server_listens_only_at_its_address() -> None:
    with listening(RecordingHandler()) as server, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.address[1]), timeout=LIMIT_S)


def test_an_unusable_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 203.0.113.7:1: .*one of this machine"):
        Listener(("203.0.113.7", 1), RecordingHandler())
    with listening(RecordingHandler()) as server, pytest.raises(ConfigError, match="port free"):
        Listener(server.address, RecordingHandler())


def test_a_failed_thread_start_affects_only_its_client(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(session: Session) -> None:
        raise RuntimeError("can't start new thread")

    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(PULL)
        with monkeypatch.context() as patched:
            patched.setattr(Session, "start", fail)
            with raw_client(server.address) as raw:
                assert receive_message(raw) == turned_away("the system cannot start another thread")
        assert channel.call(PULL).message == m.Pulled(1, 1)
        with connected(server.address) as another:
            assert another.call(PULL).message == m.Pulled(1, 1)
    assert "was refused: the system cannot start another thread" in next(iter(log_lines))


def count_inherited() -> tuple[int, list[int]]:
    """The TCP sockets of a process with a server and a client, and of its forked children."""
    from torch.utils.data import DataLoader

    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(PULL)
        own = open_connections()
        loader = DataLoader(
            ConnectionCounts(), num_workers=2, multiprocessing_context="fork", batch_size=None
        )
        in_children = [int(count) for count in loader]
        channel.call(PULL)
    return own, in_children


class ConnectionCounts:
    """A data set whose records are the number of connections of the loading process."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return open_connections()


def open_connections() -> int:
    count = 0
    for fd in open_sockets():
        with socket.socket(fileno=os.dup(fd)) as copy:
            count += copy.family == socket.AF_INET
    return count


@pytest.mark.multiprocess
def test_data_loader_processes_inherit_no_connection() -> None:
    results: list[Any] = run_processes(count_inherited, [()])
    ((own, in_children),) = results
    assert own == 3, "the listening socket and both ends of the connection"
    assert in_children == [0, 0]


# MemoryBudget: memory that connections share and must claim before use.


MIB = 1 << 20


def test_claimed_memory_is_not_available_to_others() -> None:
    budget = MemoryBudget(lambda: 10 * MIB)
    with (
        budget.claimed(6 * MIB, 1.0),
        pytest.raises(ProtocolError, match=rf"{6 * MIB} bytes are reserved for other frames"),
        budget.claimed(5 * MIB, 0.0),
    ):
        pass
    with budget.claimed(10 * MIB, 0.0):
        pass


def test_a_claim_that_would_fit_alone_waits() -> None:
    budget = MemoryBudget(lambda: 10 * MIB)
    waiting, served = threading.Event(), []

    def wait() -> None:
        waiting.set()
        with budget.claimed(9 * MIB, 30.0):
            served.append("served")

    thread = threading.Thread(target=wait)
    with budget.claimed(5 * MIB, 0.0):
        thread.start()
        assert waiting.wait(30)
        assert not served
    thread.join(30)
    assert served == ["served"]


def test_a_claim_that_never_fits_is_refused_at_once() -> None:
    budget = MemoryBudget(lambda: 10 * MIB)
    with (
        budget.claimed(MIB, 0.0),
        pytest.raises(ProtocolError, match=rf"a body of {11 * MIB} bytes, but only {10 * MIB}"),
        budget.claimed(11 * MIB, 1e6),
    ):
        pass


def test_a_claim_ends_with_its_block_even_after_an_error() -> None:
    budget = MemoryBudget(lambda: MIB)
    for _ in range(3):
        with pytest.raises(KeyError), budget.claimed(MIB, 0.0):
            raise KeyError


def test_small_bodies_and_unknown_budgets_are_not_counted() -> None:
    with (
        MemoryBudget(lambda: 0).claimed(WORTH_BYTES - 1, 0.0),
        MemoryBudget(lambda: None).claimed(1 << 60, 0.0),
    ):
        pass


def write_files(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_of_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_free_memory_comes_from_meminfo(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    write_files(tmp_path, proc__meminfo="MemTotal:  9 kB\nMemAvailable:    5 kB\nX: 1 kB\n")
    assert free_memory(tmp_path) == 5 * 1024


def test_a_container_is_limited_by_its_cgroup(tmp_path: Path) -> None:
    write_files(
        tmp_path, proc__meminfo="MemAvailable:    1000 kB\n", proc__self__cgroup="0::/job\n"
    )
    group = {"memory_of_max": "5000\n", "memory_of_current": "3000\n"}
    stat = {"memory_of_stat": "anon 1\ninactive_file 700\n"}
    write_files(tmp_path / "sys/fs/cgroup/job", **group)
    assert free_memory(tmp_path) == 2000
    write_files(tmp_path / "sys/fs/cgroup/job", **stat)
    assert free_memory(tmp_path) == 2700, "the system forgets files first"
    write_files(tmp_path / "sys/fs/cgroup/job", memory_of_max="max\n")
    assert free_memory(tmp_path) == 1000 * 1024


def test_this_machine_has_free_memory() -> None:
    free = free_memory()
    assert free is None or free > MIB
