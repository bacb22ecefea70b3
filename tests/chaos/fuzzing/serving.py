# SPDX-License-Identifier: Apache-2.0
"""Frames against a server that listens: each connection ends, with valid replies."""

import contextlib
import io
import logging
import random
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.fuzzing.making import (
    any_arrays,
    any_message,
    at_the_edge,
    damaged,
    framed,
    sensible,
)
from tests.ps.serving import closed_server, hello, open_up, plan

from fleetlight.observe.log import logger
from fleetlight.ps.messages import Message
from fleetlight.ps.plan import ASYNC, GEO, SYNC
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.transport.protocol import PREFIX_BYTES, MessageCodec, Prefix
from fleetlight.ps.transport.session import ConnectionLimits

_CODEC: MessageCodec[Message] = MessageCodec(Message)
#: connections to one server, and how many at a time
CONNECTIONS, AT_ONCE = 150, 4
#: seconds that the server waits for others, and for bytes; and that the test waits for it
_DEADLINE_S, _SILENCE_S, _ANSWER_S = 0.05, 0.3, 20.0


class _Unforeseen(logging.Handler):
    """Keeps the log records with a traceback, which are unforeseen errors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One line of the log."""
        if record.exc_info:
            self.found.append(logging.Formatter().format(record))


class Serving:
    """Rounds, each with its own server."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def round(self, number: int, at_once: int = AT_ONCE) -> int:
        """Many connections to one server; returns how many frames were sent."""
        chance = random.Random(f"{self._seed} round {number}")
        with _unforeseen() as found, tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "token").touch()
            frames = self._served(chance, number, at_once, folder)
        if found:
            raise AssertionError("a server did not foresee:\n" + "\n".join(dict.fromkeys(found)))
        return frames

    def _served(self, chance: random.Random, number: int, at_once: int, folder: str) -> int:
        the_plan = plan(chance.choice((SYNC, ASYNC, GEO)), workers=1)
        server = closed_server(1, _DEADLINE_S)
        if chance.random() < 0.9:
            open_up(server, the_plan)
        # from then on the worker may have no connection, and the job may be over
        last = chance.randrange(2 * CONNECTIONS)
        limits = ConnectionLimits(first_s=_SILENCE_S, silence_s=_SILENCE_S)
        listener = Listener(("127.0.0.1", 0), server, limits=limits)
        try:
            with _there(listener) as worker, ThreadPoolExecutor(at_once) as pool:

                def talk(one: int) -> int:
                    if one == last:
                        worker.close()
                    return self._talk(listener, the_plan, number, one, folder)

                return sum(pool.map(talk, range(CONNECTIONS)))
        finally:
            server.close()
            listener.stop()

    def _talk(
        self, listener: Listener, the_plan: object, number: int, one: int, folder: str
    ) -> int:
        """One connection; returns how many frames were sent."""
        chance = random.Random(f"{self._seed} {number} {one}")
        sent = list(_conversation(chance, the_plan, one, folder))
        with socket.create_connection(listener.address, timeout=_ANSWER_S) as raw:
            with contextlib.suppress(OSError):
                raw.sendall(b"".join(sent))
                if chance.random() < 0.9:
                    raw.shutdown(socket.SHUT_WR)
                else:
                    # a deadline ends the wait for the rest of a frame, but not that for a frame
                    begun = next((frame for frame in reversed(sent) if frame), b"")
                    raw.sendall(begun[:10])
            _check_replies(_received(raw, f"connection {one} of round {number}"))
        return len(sent)


def _conversation(
    chance: random.Random, the_plan: object, one: int, folder: str
) -> Iterator[bytes]:
    """Messages of a worker, some of them in the right order."""
    lane = chance.choice(("control", "push", "pull"))
    if chance.random() < 0.85:
        yield framed(1, (hello(0, lane, 1), [])).packed()
    for request in range(2, 2 + chance.randrange(1, 6)):
        words = sensible(chance, the_plan, 10 * one + request, folder)  # type: ignore[arg-type]
        draws = chance.random()
        if draws < 0.15:
            words = any_message(chance), any_arrays(chance)
        elif draws < 0.2:
            words = words[0], any_arrays(chance)
        elif draws < 0.45:
            words = at_the_edge(chance, words)
        frame = framed(request, words)
        if draws < 0.6:
            yield frame.packed()
        else:
            yield damaged(chance, frame, framed(request, (any_message(chance), [])))


@contextlib.contextmanager
def _there(listener: Listener) -> Iterator[socket.socket]:
    """A connection that keeps the worker in the job."""
    with socket.create_connection(listener.address, timeout=_ANSWER_S) as raw:
        raw.sendall(framed(1, (hello(0, "control", 1), [])).packed())
        with contextlib.suppress(OSError):
            raw.recv(1)
        yield raw


def _received(raw: socket.socket, who: str) -> bytes:
    """All bytes until the server closes."""
    parts = []
    try:
        while part := raw.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        return b""
    except TimeoutError:
        raise AssertionError(f"{who} got neither an answer nor an end") from None
    return b"".join(parts)


def _check_replies(data: bytes) -> None:
    """Check that replies are whole frames."""
    left = io.BytesIO(data)
    while start := left.read(PREFIX_BYTES):
        prefix = Prefix.parse(start)
        _CODEC.decode_header(prefix, left.read(prefix.header))
        assert len(left.read(prefix.body)) == prefix.body, "an answer was cut"


@contextlib.contextmanager
def _unforeseen() -> Iterator[list[str]]:
    handler = _Unforeseen()
    before, threading.excepthook = threading.excepthook, _hook(handler)
    was = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)
        logger.propagate = was
        threading.excepthook = before


def _hook(handler: _Unforeseen) -> Callable[[threading.ExceptHookArgs], None]:
    def hook(happened: threading.ExceptHookArgs) -> None:
        handler.found.append(f"a thread ended: {happened.exc_type}: {happened.exc_value}")

    return hook
