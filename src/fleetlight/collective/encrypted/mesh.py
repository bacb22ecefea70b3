# SPDX-License-Identifier: Apache-2.0
"""`Mesh`: flat buffers to and from the other members of one process group.

A thread sends while the caller receives, so both directions of a link are busy at once. Members
send and receive in the order of their distance. So no circle of members can wait for each other,
however small the kernel's buffers are.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleetlight.collective.encrypted.links import LinkError, Links, link_error
from fleetlight.errors import FleetError

if TYPE_CHECKING:
    from fleetlight.wire.tls import TlsWire

_END_S = 5.0


class PendingSend:
    """A buffer that a thread sends."""

    def __init__(self, to: int, buffer: memoryview) -> None:
        self.to, self.buffer = to, buffer
        self.failure: LinkError | None = None
        self._done = threading.Event()

    def end(self, failure: LinkError | None) -> None:
        """Record that the buffer was sent, or that sending failed."""
        self.failure = failure
        self._done.set()

    def wait(self) -> None:
        """Wait until the thread no longer reads the buffer."""
        self._done.wait()
        if self.failure is not None:
            raise self.failure


class Mesh:
    """The other members, by their rank in the group."""

    def __init__(
        self, links: Links, name: str, rank: int, members: Sequence[int], limit_s: float
    ) -> None:
        """`members` are the workers of the group, in the order of their ranks."""
        self.rank, self.size = rank, len(members)
        self._links, self._name, self._members = links, name, list(members)
        self._limit_s = limit_s
        self._out: dict[int, TlsWire] = {}
        self._in: dict[int, TlsWire] = {}
        self._queue: queue.SimpleQueue[PendingSend | None] = queue.SimpleQueue()
        self._failure: LinkError | None = None
        self._thread = threading.Thread(target=self._send, name="fleet-tls-send", daemon=True)
        self._thread.start()

    def after(self) -> list[int]:
        """The other members, in the order in which this one sends to them."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def before(self) -> list[int]:
        """The other members, in the order in which this one receives from them."""
        return [(self.rank - step) % self.size for step in range(1, self.size)]

    def send(self, to: int, tensor: Tensor) -> PendingSend:
        """Start to send a flat tensor; callers leave it alone until `wait` returns."""
        sending = PendingSend(to, view(tensor))
        self._queue.put(sending)
        return sending

    def receive(self, source: int, into: Tensor) -> None:
        """Receive a flat tensor from a member."""
        try:
            if source not in self._in:
                member = self._members[source]
                self._in[source] = self._links.of(self._name, member, self._limit_s)
            self._in[source].read_all(view(into), "a collective", self._limit_s)
        except FleetError as error:
            raise link_error(error) from None

    def close(self) -> None:
        """End the thread, then close the connections."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)
        for wire in (*self._out.values(), *self._in.values()):
            wire.interrupt()
            wire.close()

    def interrupt(self) -> None:
        """End every wait of this member."""
        for wire in (*list(self._out.values()), *list(self._in.values())):
            wire.interrupt()

    def _send(self) -> None:
        while (sending := self._queue.get()) is not None:
            if self._failure is None:
                self._failure = self._sent(sending)
            sending.end(self._failure)

    def _sent(self, sending: PendingSend) -> LinkError | None:
        try:
            if sending.to not in self._out:
                member = self._members[sending.to]
                self._out[sending.to] = self._links.to(self._name, member, self._limit_s)
            self._out[sending.to].write([sending.buffer], "a collective", self._limit_s)
        except FleetError as error:
            return link_error(error)
        except LinkError as error:
            return error
        return None


def view(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor in main memory."""
    return tensor.detach().view(torch.uint8).numpy().data.cast("B")
