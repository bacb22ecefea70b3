# SPDX-License-Identifier: Apache-2.0
"""`SimulatedChannel`: what a client of the package takes for its connection to a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tests.chaos.simulation.elastic.host import ElasticHost
from tests.chaos.simulation.host import Link
from tests.chaos.simulation.lane import Lane, Words
from tests.chaos.simulation.world import Task

from fleetlight.errors import PeerLostError
from fleetlight.ps import messages as m
from fleetlight.ps.message_base import error_of
from fleetlight.ps.transport.interface import DEFAULT_RETRY, ReceivedReply
from fleetlight.ps.worker.connections import HEARTBEAT

if TYPE_CHECKING:
    from tests.chaos.simulation.elastic.worker import ElasticWorker

Array = NDArray[Any]


class ElasticLane(Lane):
    """It may be cut off, and its server may have ended."""

    worker: ElasticWorker  # type: ignore[assignment]
    host: ElasticHost
    #: True once the request was sent over any connection
    _was_sent = False

    def ask(self, words: Words) -> None:
        self._was_sent = False
        super().ask(words)

    @property
    def is_busy(self) -> bool:
        """True while a request has no reply."""
        return self._request is not None

    def _is_cut(self) -> bool:
        return self.worker.is_cut(self.host)

    def _connect(self) -> None:
        if self.host.is_over and self._request is not None:
            self._refuse("the server has ended")
            return
        super()._connect()

    def _transmit(self, link: Link, message: m.Message, arrays: Sequence[Array]) -> None:
        if self.host.is_over:
            self._refuse("the server has ended")
            return
        self._was_sent |= self._is_welcome
        super()._transmit(link, message, arrays)

    def broke(self, link: Link) -> None:
        """An event: this end notices that the connection is gone."""
        request = self._request
        is_mine = link is self._link and request is not None
        if is_mine and self._was_sent and not request[0].repeatable:
            self._link = None
            self._refuse("the connection was lost")
            return
        super().broke(link)

    def _delay_s(self) -> float | None:
        script = self.worker.script
        return script.slow_s if self.host.index == script.slow_server else None

    def _tell(self, what: Any) -> None:
        # a worker that waits sends many heartbeats
        if self.name != HEARTBEAT:
            super()._tell(what)

    def _refuse(self, why: str) -> None:
        self._request = None
        if not self.worker.is_gone:
            self.worker.answered(self, (m.Failure("PeerLostError", why), []))


class SimulatedChannel:
    """One request at a time; the thread of the worker waits for the reply in the world."""

    welcome = None
    is_local, is_embedded = True, False

    def __init__(self, lane: ElasticLane) -> None:
        self._lane, self._worker = lane, lane.worker
        self.peer, self.retry = str(lane.host), DEFAULT_RETRY
        self._reply: Words | None = None
        self._task: Task | None = None

    def answered(self, reply: Words) -> None:
        """An event: the reply is there."""
        self._reply = reply
        if self._task is not None:
            self._worker.world.at(self._worker.world.now, self._worker.world.wake, self._task)

    def output(self, shape: tuple[int, ...], dtype: str) -> None:
        """No memory is shared."""

    def bytes_moved(self) -> tuple[int, int]:
        """Nothing is counted."""
        return 0, 0

    def send(self, message: m.Message, arrays: Sequence[Array] = ()) -> None:
        """Send a request."""
        self._check_runs()
        self._reply = None
        self._lane.ask((message, [np.array(array) for array in arrays]))

    def receive(self, deadline_s: float | None = None) -> ReceivedReply:
        """Wait for the reply."""
        world = self._worker.world
        self._check_runs()
        while self._reply is None:
            self._task = world.current
            world.wait(looks=False)
        (message, arrays), self._reply, self._task = self._reply, None, None
        if isinstance(message, m.Failure):
            raise error_of(message, self.peer)
        return ReceivedReply(message, arrays)

    def _check_runs(self) -> None:
        """A loop that ends with its process gives nothing back."""
        task = self._worker.world.current
        has_ended = self._worker.is_gone or self._worker.has_failed
        if has_ended or task is None or task.is_dead:
            raise PeerLostError("the process has ended")

    def close(self) -> None:
        """The process closes its connections when it ends."""
