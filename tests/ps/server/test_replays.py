# SPDX-License-Identifier: Apache-2.0
"""Requests of a worker, recorded on the wire and replayed by an attacker."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.serving import OPTIONS, hello, ids_of, opened, plan, rows_of
from tests.ps.transport.doubles import LIMIT_S, raw_client, read_all

from fleetlight.errors import ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.transport import Listener, SocketChannel
from fleetlight.ps.transport.frames import Frames
from fleetlight.roles.role import Endpoint
from fleetlight.roles.secret import Secret
from fleetlight.wire.plain import Wire

TOKEN = Secret("3f9ac27e51d0b846")
TABLE = m.TablePush(0)


@contextlib.contextmanager
def serving(token: Secret | None = None) -> Iterator[Endpoint]:
    server = opened(plan("async", workers=1))
    listener = Listener(("127.0.0.1", 0), server, token=token)
    try:
        yield listener.address
    finally:
        listener.stop()


@contextlib.contextmanager
def recorded(server: Endpoint) -> Iterator[tuple[Endpoint, bytearray]]:
    """A proxy of the server, and all bytes that one client sends through it."""
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def carry(source: socket.socket, sink: socket.socket, keep: bytearray) -> None:
            while data := source.recv(1 << 16):
                keep.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        def relay() -> None:
            client, _ = listening.accept()
            with client, raw_client(server) as upstream:
                replies_thread = threading.Thread(
                    target=carry, args=(upstream, client, bytearray())
                )
                replies_thread.start()
                carry(client, upstream, sent)
                replies_thread.join(LIMIT_S)

        thread = threading.Thread(target=relay)
        thread.start()
        yield listening.getsockname(), sent
        thread.join(LIMIT_S)


def worker(address: Endpoint, lane: str, token: Secret | None = None) -> SocketChannel:
    greeting = partial(hello, 0, lane, 1)
    return SocketChannel.connect(
        address, "server 0", deadline_s=LIMIT_S, token=token, greeting=greeting
    )


def push(sequence: int, epoch: int = 0) -> m.Push:
    return m.Push(sequence, epoch, 0, sequence, 0, OPTIONS, [TABLE], dense=False)


def row(channel: SocketChannel) -> float:
    pull = m.Pull([m.TablePull(0, insert=False)], dense=False)
    return float(channel.call(pull, [ids_of([7])]).arrays[0][0, 0])


def record_push(server: Endpoint, token: Secret | None = None) -> bytes:
    """A greeting and a push of 1 to row 7, as they were on the wire."""
    with recorded(server) as (proxy, sent):
        channel = worker(proxy, "push", token)
        channel.call(push(0), [ids_of([7]), rows_of([1])])
        channel.close()
    return bytes(sent)


def replay(server: Endpoint, recording: bytes, replies: int) -> list[m.Message]:
    """The first replies of a server to a recording that is sent over a new connection."""
    with raw_client(server) as raw:
        raw.sendall(recording)
        frames = Frames(Wire(raw, "the server"), LIMIT_S)
        found = [frames.receive("a test") for _ in range(replies)]
        raw.shutdown(socket.SHUT_WR)
        read_all(raw)
    return [frame.message for frame in found if frame is not None]


def test_a_replayed_push_is_not_applied_again() -> None:
    with serving() as server:
        control = worker(server, "control")
        recording = record_push(server)
        assert row(control) == -1
        _, again = replay(server, recording, 2)
        assert isinstance(again, m.Pushed)
        assert row(control) == -1
        control.close()


def test_replayed_frames_of_an_old_epoch_are_refused(tmp_path: Path) -> None:
    """A checkpoint was loaded in between, so even frames new to the server are refused."""
    with serving() as server:
        control = worker(server, "control")
        recording = record_push(server)
        (tmp_path / "token").write_text("")
        saved: Any = control.call(m.Save(str(tmp_path), "token", 0)).message
        files = [(file.table, file.name) for file in saved.files]
        control.call(m.Load(str(tmp_path), files, epoch=1))
        _, refused = replay(server, recording, 2)
        assert isinstance(refused, m.Failure)
        assert "pushed for epoch 0, but this server is in epoch 1" in refused.text
        with pytest.raises(ProtocolError, match="pushed for epoch 0"):
            control.call(push(1), [ids_of([7]), rows_of([1])])
        assert row(control) == -1
        control.call(push(1, epoch=1), [ids_of([7]), rows_of([1])])
        assert row(control) == -2
        control.close()


def test_with_a_token_a_replayed_connection_fails_the_challenge() -> None:
    with serving(TOKEN) as server:
        control = worker(server, "control", TOKEN)
        recording = record_push(server, TOKEN)
        challenge, refused = replay(server, recording, 2)
        assert isinstance(challenge, m.Challenge)
        assert isinstance(refused, m.Failure)
        assert "does not know the token" in refused.text
        np.testing.assert_equal(row(control), -1)
        control.close()
