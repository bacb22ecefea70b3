# SPDX-License-Identifier: Apache-2.0
"""`Host`: one server of the package, its process and its disk; `Link`: a connection to it.

The server is the real one. `Machinery` replaces what surrounds it: locks wait in the world, the
disk is in memory, and rows count.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from tests.chaos.simulation.disk import Disk, MemoryFolder, MemorySegment, memory_history
from tests.chaos.simulation.locks import Threading
from tests.chaos.simulation.oracle import Oracle, broken
from tests.chaos.simulation.script import Script
from tests.chaos.simulation.values import Rows
from tests.chaos.simulation.world import Died, Violation, World

from fleetlight.errors import FleetError, PeerLostError
from fleetlight.observe import log
from fleetlight.ps import messages as m
from fleetlight.ps.journal import journal
from fleetlight.ps.journal.journal import NEVER, Policy
from fleetlight.ps.message_base import failure_of
from fleetlight.ps.server import server, shared_exclusive_lock, write_ahead_log
from fleetlight.ps.server.checkpoints import checkpoint_handler
from fleetlight.ps.server.durability import durability
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.workers import presence
from fleetlight.ps.tables import ordered_snapshot, unordered_snapshot
from fleetlight.ps.transport.interface import Connection

#: later than all events
DEADLINE_S = 1e6
_THREADING = Threading()
_DURABLE = Durable(
    None,  # type: ignore[arg-type]
    job="a job",
    policy=Policy(sync=NEVER),
    away_s=DEADLINE_S,
)


@contextlib.contextmanager
def machinery() -> Iterator[None]:
    """Put the simulated machine in place of the real one."""
    with contextlib.ExitStack() as stack:
        for module in (
            presence,
            write_ahead_log,
            shared_exclusive_lock,
            checkpoint_handler,
            journal,
            durability,
        ):
            stack.enter_context(mock.patch.object(module, "threading", _THREADING))
        stack.enter_context(mock.patch.object(journal, "Segment", MemorySegment))
        stack.enter_context(mock.patch.object(durability, "history", memory_history))
        for level in ("info", "warning"):
            stack.enter_context(mock.patch.object(log.logger, level, _silent))
        for kind in (ordered_snapshot, unordered_snapshot):
            stack.enter_context(mock.patch.object(kind, "get_ready", _silent))
        stack.enter_context(mock.patch.object(server, "ServerState", _rows_of))
        # they are equal, and the check takes long
        stack.enter_context(mock.patch.object(server, "first_difference", _silent))
        yield


def _silent(*_: object) -> None:
    """Listen at no address."""


def _rows_of(plan: Any, server: int, hosts: Sequence[Host], *_: Any) -> Rows:
    return hosts[server].rows_kind(plan, hosts[server].makes)


class _Durability(Durability):
    """The real one, on a disk in memory."""

    def __init__(self, disk: Disk, durable: Durable) -> None:
        self._durable = durable
        self._folder = MemoryFolder(disk)  # type: ignore[assignment]
        self._journal = None
        self._over = _THREADING.Event()
        self._snapshots = _THREADING.Thread()  # type: ignore[assignment]


class _Server(Server):
    """The real one, whose disk is given to it."""

    disk: Disk

    def _opened(self, durable: Durable, plan: Any, loading: bool) -> Durability:
        return _Durability(self.disk, durable)


class Link:
    """A connection, from both ends."""

    def __init__(self, lane: Any) -> None:
        self.lane = lane
        self.incarnation = 0
        self.is_broken = False
        self.connection = Connection(
            f"a worker's {lane.name} connection", lambda: None, lambda: self.is_broken, self._output
        )
        #: requests without a reply
        self.owed = 0
        #: memory of the latest reply
        self._replied: list[Any] = []

    def _output(self, shape: tuple[int, ...], dtype: str) -> Any:
        self._replied.append(np.empty(shape, dtype))
        return self._replied[-1]

    def begin(self) -> None:
        """The next request begins: its reply overwrites the memory of the one before."""
        for array in self._replied:
            array[:] = -1000
        self._replied.clear()


class Host:
    """A process that restarts whenever it dies."""

    rows_kind = Rows
    durable, deadline_s = _DURABLE, DEADLINE_S
    #: how many workers the job may have; None: it keeps its workers
    places: int | None = None

    def __init__(self, world: World, index: int, script: Script, oracle: Oracle) -> None:
        self.world, self.index, self.script, self.oracle = world, index, script, oracle
        self.disk = Disk(world, f"server {index}")
        self.server: _Server | None = None
        self.incarnation = 0
        #: the incarnation ends after so many moments, or within that write; below 0: never
        self.moments_left = -1
        self.writes_left = -1
        self.links: list[Link] = []
        self.plan = script.plan()

    def __str__(self) -> str:
        return f"server {self.index}"

    def start(self) -> None:
        """An event: start an incarnation."""
        self.incarnation += 1
        self.world.tell(str(self), f"starts, incarnation {self.incarnation}")
        self.world.spawn(self, f"{self} incarnation {self.incarnation}", self._serve)

    def _serve(self) -> None:
        script = self.script
        _THREADING.world = self.world
        made = _Server(
            self.index,
            script.servers,
            script.workers,
            version="",
            deadline_s=self.deadline_s,
            worker_max=self.places,
            clock=self.world.clock,
        )
        made.disk = self.disk
        hosts: Any = [self] * script.servers
        # workers may come while it loads its values
        self.server = made
        made.open(self.plan, hosts, (), durable=self.durable if script.log else None)

    def makes(self, columns: set[int]) -> None:
        """A step is made of the updates of these columns."""
        # steps of an earlier incarnation were checked then
        if self.server is not None and self.server.is_open:
            self.oracle.made(self.index, columns)

    def moment(self) -> None:
        """A moment, which may be the last one; called by its own threads."""
        if self.moments_left >= 0:
            self.moments_left -= 1
            if self.moments_left < 0:
                self.die()
                raise Died

    def dies_writing(self) -> bool:
        """A write, which may be the last one."""
        self.writes_left -= self.writes_left >= 0
        return self.writes_left == 0

    def die(self) -> None:
        """Die as by SIGKILL."""
        if self.server is None:
            return
        self.world.tell(str(self), "dies")
        self.server = None
        self.moments_left = self.writes_left = -1
        self.disk.lose_power_of_writer()
        self.world.kill(self)
        links, self.links = self.links, []
        for link in links:
            link.is_broken = True
            self.world.later(link.lane.broke, link)
        self.world.later(self.start)

    def hear(self, link: Link, message: m.Message, arrays: Sequence[Any]) -> None:
        """An event: a request arrives."""
        if self.server is None or link.incarnation != self.incarnation:
            self.world.later(link.lane.broke, link)
            return
        name = f"{link.lane} {link.owed}"
        self.world.spawn(self, name, lambda: self._handle(link, message, arrays))

    def _handle(self, link: Link, message: m.Message, arrays: Sequence[Any]) -> None:
        serving = self.server
        assert serving is not None
        link.begin()
        try:
            reply = serving(link.connection, message, list(arrays))
        except FleetError as error:
            reply = failure_of(error), []
        except Violation:
            raise
        except Exception as error:
            raise broken("foreseen", "".join(traceback.format_exception(error))) from error
        self._check_reply(serving, link, message, reply[0])
        self.world.moment()
        link.owed -= 1
        if link.is_broken:
            self._gone(link)
        else:
            received = reply[0], [np.array(array) for array in reply[1]]
            self.world.later(link.lane.received, link, received)

    def _check_reply(
        self, serving: _Server, link: Link, message: m.Message, reply: m.Message
    ) -> None:
        self._check_here(serving, link)
        if isinstance(message, m.Pull) and isinstance(reply, m.Pulled) and message.at_least:
            worker = link.lane.worker.index
            self.oracle.waited(self.index, self.rows, message.phase, message.at_least, worker)

    def _check_here(self, serving: _Server, link: Link) -> None:
        worker, roster = link.lane.worker, serving._roster
        is_it = roster.started_at(worker.index) == worker.redo.started_at
        if roster.is_away(worker.index) and is_it and not (link.is_broken or worker.is_gone):
            raise broken("away", f"{self} takes {worker} for away, and replies to it")

    @property
    def rows(self) -> Any:
        """Its rows."""
        assert self.server is not None
        assert self.server._service is not None
        return self.server._service.state

    def hung_up(self, link: Link) -> None:
        """An event: a connection has ended, perhaps during a request."""
        if self.server is not None and link.incarnation == self.incarnation and not link.owed:
            self.world.spawn(self, f"{link.lane}, hung up", lambda: self._gone(link))

    def _gone(self, link: Link) -> None:
        if self.server is not None and link in self.links:
            self.links.remove(link)
            self.server.gone(link.connection, PeerLostError("it was lost"))

    def snapshot(self) -> None:
        """An event: the rows are written, if there is a server."""
        if self.server is not None and self.server._durability is not None:
            kept = self.server._durability
            self.world.tell(str(self), "takes a snapshot")
            self.world.spawn(self, f"{self}, a snapshot", kept.snapshot)  # type: ignore[arg-type]

    def end(self) -> None:
        """An event: all workers have left."""
        self.world.spawn(self, f"{self}, its end", self._end)

    def _end(self) -> None:
        assert self.server is not None
        try:
            self.server.wait()
        except FleetError as error:
            raise broken("cause", f"{self} ended with {error}") from error
        self.server.close()
        if self.disk.files:
            raise broken("left", f"{self} has left files {sorted(self.disk.files)}")
