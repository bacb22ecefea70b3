# SPDX-License-Identifier: Apache-2.0
"""What a worker has said, recorded on the wire and said again by somebody else."""

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
from tests.ps.transport.doubles import LIMIT_S, heard, stranger

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
    """Another way to the server, and all that one client sends on it."""
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def carry(source: socket.socket, sink: socket.socket, keep: bytearray) -> None:
            while data := source.recv(1 << 16):
                keep.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        def relay() -> None:
            near, _ = door.accept()
            with near, stranger(server) as far:
                back = threading.Thread(target=carry, args=(far, near, bytearray()))
                back.start()
                carry(near, far, said)
                back.join(LIMIT_S)

        thread = threading.Thread(target=relay)
        thread.start()
        yield door.getsockname(), said
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


def pushes_recorded(server: Endpoint, token: Secret | None = None) -> bytes:
    """A greeting and a push of 1 to row 7, as they were on the wire."""
    with recorded(server) as (way, said):
        channel = worker(way, "push", token)
        channel.call(push(0), [ids_of([7]), rows_of([1])])
        channel.close()
    return bytes(said)


def said_again(server: Endpoint, recording: bytes, answers: int) -> list[m.Message]:
    """What a server answers to a recording that comes over a new connection."""
    with stranger(server) as raw:
        raw.sendall(recording)
        frames = Frames(Wire(raw, "the server"), LIMIT_S)
        found = [frames.receive("a test") for _ in range(answers)]
        raw.shutdown(socket.SHUT_WR)
        heard(raw)
    return [frame.message for frame in found if frame is not None]


def test_a_push_that_is_said_again_is_not_applied_again() -> None:
    with serving() as server:
        control = worker(server, "control")
        recording = pushes_recorded(server)
        assert row(control) == -1
        _, again = said_again(server, recording, 2)
        assert isinstance(again, m.Pushed)
        assert row(control) == -1
        control.close()


def test_frames_of_an_old_epoch_are_refused(tmp_path: Path) -> None:
    """Whether they are new to the server or not: a checkpoint was loaded in between."""
    with serving() as server:
        control = worker(server, "control")
        recording = pushes_recorded(server)
        (tmp_path / "token").write_text("")
        saved: Any = control.call(m.Save(str(tmp_path), "token", 0)).message
        files = [(file.table, file.name) for file in saved.files]
        control.call(m.Load(str(tmp_path), files, epoch=1))
        _, refused = said_again(server, recording, 2)
        assert isinstance(refused, m.Failure)
        assert "pushed for epoch 0, but this server is in epoch 1" in refused.text
        with pytest.raises(ProtocolError, match="pushed for epoch 0"):
            control.call(push(1), [ids_of([7]), rows_of([1])])
        assert row(control) == -1
        control.call(push(1, epoch=1), [ids_of([7]), rows_of([1])])
        assert row(control) == -2
        control.close()


def test_with_a_token_a_recording_gets_no_further_than_the_proof() -> None:
    with serving(TOKEN) as server:
        control = worker(server, "control", TOKEN)
        recording = pushes_recorded(server, TOKEN)
        challenge, refused = said_again(server, recording, 2)
        assert isinstance(challenge, m.Challenge)
        assert isinstance(refused, m.Failure)
        assert "does not know the token" in refused.text
        np.testing.assert_equal(row(control), -1)
        control.close()
