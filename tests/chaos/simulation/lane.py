# SPDX-License-Identifier: Apache-2.0
"""`Lane`: a model of `SocketChannel`, a worker's end of a connection to a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from tests.chaos.simulation.host import Host, Link

from fleetlight.ps import messages as m

if TYPE_CHECKING:
    from tests.chaos.simulation.worker import Worker

Array = NDArray[Any]
Words = tuple[m.Message, Sequence[Array]]


class Lane:
    """One request at a time, sent again when its connection breaks."""

    def __init__(self, worker: Worker, name: str, host: Host) -> None:
        self.worker, self.name, self.host = worker, name, host
        #: the incarnation of the server that accepted it last
        self.incarnation = 1
        self._world = worker.world
        self._link: Link | None = None
        self._is_welcome = False
        self._request: Words | None = None

    def __str__(self) -> str:
        return f"{self.worker}'s {self.name} lane to {self.host}"

    def ask(self, words: Words) -> None:
        """Send a request; the reply goes to the worker."""
        self._request = words
        if self._link is None:
            self._connect()
        elif self._is_welcome:
            self._transmit(self._link, *words)

    def _connect(self) -> None:
        if self.worker.is_gone or self._link is not None or self._request is None:
            return
        if self.host.server is None or self._is_cut():
            self._world.later(self._connect)
            return
        self._link, self._is_welcome = link, _ = Link(self), False
        link.incarnation = self.host.incarnation
        self.host.links.append(link)
        self._transmit(link, self.worker.hello(self), [])

    def _is_cut(self) -> bool:
        """True while no connection can be made."""
        return self.worker.is_asleep

    def _transmit(self, link: Link, message: m.Message, arrays: Sequence[Array]) -> None:
        link.owed += 1
        self._tell("Join" if isinstance(message, m.Join) else message)
        self._world.later(self.host.hear, link, message, arrays, within=self._delay_s())

    def received(self, link: Link, reply: Words) -> None:
        """An event: a reply arrives, unless the end of its connection was noticed before."""
        if link is not self._link or self.worker.is_gone:
            return
        message = reply[0]
        self._tell(f"is answered {message}")
        if self._is_welcome or not isinstance(message, (m.Welcome, m.Failure)):
            self._request = None
            self.worker.answered(self, reply)
        elif isinstance(message, m.Welcome):
            self._is_welcome, self.incarnation = True, message.incarnation
            if self._request is not None:
                self._transmit(link, *self._request)
        elif message.kind == "PeerLostError":
            # it has not loaded its values yet
            self._hang_up(link)
            self._world.later(self._connect)
        else:
            self._request = None
            self.worker.answered(self, reply)

    def broke(self, link: Link) -> None:
        """An event: this end notices that the connection is gone."""
        if link is self._link:
            self._link = None
            self._connect()

    def breaks(self) -> None:
        """An event: the network loses a connection; each end notices in its own time."""
        link = self._link
        if link is not None and not link.is_broken:
            self._tell("breaks")
            self._hang_up(link)
            self._link = link
            self._world.later(self.broke, link)

    def _delay_s(self) -> float | None:
        """How long a request is on its way at most; None: as all messages."""
        return None

    def _tell(self, what: Any) -> None:
        self._world.tell(str(self), what)

    def _hang_up(self, link: Link) -> None:
        link.is_broken = True
        self._link = None
        self._world.later(self.host.hung_up, link)

    def close(self) -> None:
        """The process has ended."""
        if self._link is not None and not self._link.is_broken:
            self._hang_up(self._link)
