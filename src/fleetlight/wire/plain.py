# SPDX-License-Identifier: Apache-2.0
"""A connected socket that transfers whole buffers, with deadlines that name the peer."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fleetlight.errors import DeadlineError, MembershipError, PeerLostError
from fleetlight.wire.descriptors import bound_waits, bytes_moved

T = TypeVar("T")
#: what sockets and files write
Buffer = bytes | memoryview

#: the kernel's limit of buffers per call
_IOV_MAX = 1024
#: limits of the kernel's timeout, after which a wait checks the clock
_MAX_STEP_S = 5.0
_MIN_STEP_S = 0.02
#: how long to wait for a peer to read the last bytes before the connection closes
_LINGER_S = 1.0
#: the event of a peer that has closed; not all systems report it before all is read
_HUNG_UP = getattr(select, "POLLRDHUP", 0)


class Wire:
    """A plain TCP connection."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self._socket = connected
        self.peer = peer
        #: the wait for which the kernel's timeout was chosen
        self._waits_s = -1.0
        self._step_s = 0.0

    def fileno(self) -> int:
        """The descriptor, to wait for this connection and others."""
        return self._socket.fileno()

    def is_local(self) -> bool:
        """True if both ends are on this host."""
        try:
            return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])
        except OSError:  # it has ended
            return False

    def bytes_moved(self) -> tuple[int, int]:
        """How many bytes have been sent and received; (0, 0) where the system does not count."""
        return bytes_moved(self._socket)

    def read(
        self, into: memoryview, operation: str, silence_s: float = math.inf, until: float = math.inf
    ) -> int:
        """Read some bytes; return their number, 0 at the end of the connection.

        The wait ends after `silence_s`, or at the time `until` on the monotonic clock.
        """
        left = self._left(operation, silence_s, until)
        return self._wait(operation, left, self._receive_some, into)

    def wait_readable(self, operation: str, silence_s: float) -> None:
        """Wait until the connection is readable, or raise DeadlineError."""
        if not self.is_readable(silence_s):
            raise DeadlineError(f"{self.peer} was silent for {silence_s:.1f} s during {operation}")

    def is_readable(self, within_s: float) -> bool:
        """True if bytes, or the end of the connection, arrive within `within_s`."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            return True  # another thread closed the socket, which the next read reports
        return bool(poll.poll(1000 * within_s))

    def has_ended(self) -> bool:
        """True if the peer has closed, even if bytes are left to read. For other threads."""
        poll = select.poll()
        try:
            poll.register(self._socket, _HUNG_UP)
        except ValueError:
            return True  # closed on this side
        return bool(poll.poll(0))

    def read_all(
        self, into: memoryview, operation: str, silence_s: float, until: float = math.inf
    ) -> None:
        """Fill `into`; `silence_s` counts from the last byte that arrived."""
        while into:
            left = self._left(operation, silence_s, until)
            count = self._wait(operation, left, self._receive_all, into)
            if count == 0:
                raise self.lost(operation, "it closed the connection in the middle of a frame")
            into = into[count:]

    def write(
        self,
        buffers: Sequence[Buffer],
        operation: str,
        silence_s: float,
        until: float = math.inf,
    ) -> None:
        """Send all buffers; `silence_s` counts from the last byte that was accepted."""
        rest = [memoryview(buffer) for buffer in buffers]
        while rest:
            left = self._left(operation, silence_s, until)
            rest = unsent(rest, self._wait(operation, left, self._send, rest))

    def close(self) -> None:
        """Close at once; a second call has no effect."""
        self._socket.close()

    def interrupt(self) -> None:
        """End all waits on this connection. For other threads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def stop_reading(self) -> None:
        """Let reads find the end, while writes complete. For other threads."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def linger(self) -> None:
        """Close after the peer has read the last bytes.

        Closing a socket while bytes arrive resets the connection, and the peer may lose what was
        sent before.
        """
        end = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left := end - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(1 << 16):
                    break
        self.close()

    def lost(self, operation: str, why: str) -> PeerLostError:
        """The error about a lost peer."""
        return PeerLostError(f"lost {self.peer} during {operation}: {why}")

    def _receive_some(self, into: memoryview) -> int:
        return self._socket.recv_into(into)

    def _receive_all(self, into: memoryview) -> int:
        """Read as many bytes as arrive within a step."""
        return self._socket.recv_into(into, flags=socket.MSG_WAITALL)

    def _send(self, buffers: Sequence[memoryview]) -> int:
        return self._socket.sendmsg(buffers[:_IOV_MAX])

    def _left(self, operation: str, silence_s: float, until: float) -> float:
        """The time left for a wait, and set the kernel's timeout accordingly."""
        left = silence_s if until == math.inf else min(silence_s, until - time.monotonic())
        self._set_step(left, operation)
        return left

    def _set_step(self, silence_s: float, operation: str) -> None:
        if silence_s == self._waits_s:
            return
        self._waits_s = silence_s
        step = min(_MAX_STEP_S, max(_MIN_STEP_S, silence_s / 4))
        if step == self._step_s:
            return
        self._step_s = step
        try:
            # Python's timeouts would make the socket non-blocking and cost a system call for each
            # read and write; these are the kernel's
            self._socket.settimeout(None)
            bound_waits(self._socket, step)
        except OSError as error:  # another thread closed the socket
            raise self._failed(error, operation) from None

    def _wait(self, operation: str, silence_s: float, act: Callable[[T], int], on: T) -> int:
        """Repeat `act` after each timeout of the kernel, up to `silence_s`."""
        began = time.monotonic()
        while True:
            try:
                return act(on)
            except BlockingIOError:
                silent = time.monotonic() - began
                if silent >= silence_s:
                    raise DeadlineError(
                        f"{self.peer} was silent for {silent:.1f} s during {operation}"
                    ) from None
            except OSError as error:
                raise self._failed(error, operation) from None

    def _failed(self, error: OSError, operation: str) -> PeerLostError | MembershipError:
        return self.lost(operation, error.strerror or str(error))


def unsent(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The rest of the buffers after `done` bytes."""
    for number, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[number + 1 :]]
        done -= len(buffer)
    return []
