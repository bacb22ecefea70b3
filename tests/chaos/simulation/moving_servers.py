# SPDX-License-Identifier: Apache-2.0
"""A schedule of a job whose servers move: an engine restarts them, and workers look for them.

Messages arrive late. Servers are killed, or pause until the engine takes them for lost. The
rendezvous loses its memory, and links are cut.
"""

import dataclasses
from collections.abc import Sequence

from tests.chaos.simulation.oracle import broken
from tests.chaos.simulation.world import World

from fleetlight.errors import MembershipError
from fleetlight.ps.messages import Announce, ServerEntry
from fleetlight.ps.rendezvous.directory import SILENCE_S, Directory, OccupiedError
from fleetlight.ps.rendezvous.service import OCCUPIED_S

#: the time of accidents, and the quiet time after it
_BUSY_S, _QUIET_S = 60.0, 60.0
#: how long a message takes at most, and how often servers and workers call
_DELAY_S, _EVERY_S = 3.0, 1.0
RUNNING, PAUSED, DEAD = "running", "paused", "dead"


@dataclasses.dataclass(eq=False)
class _ServerProcess:
    """A process of a server."""

    name: str
    server: int
    #: counts the processes that the engine has started
    order: int
    state: str = RUNNING
    incarnation: int = 0
    #: when it first called without success
    asks_since: float | None = None
    is_cut: bool = False


class _AskingWorker:
    """Knows where servers listen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[int, ServerEntry] = {}

    def hear(self, entries: Sequence[ServerEntry]) -> None:
        """Take an answer; a violation if it contradicts an earlier one."""
        for entry in entries:
            before = self.known.get(entry.server)
            if before is not None and before.process != entry.process:
                if entry.incarnation < before.incarnation:
                    raise broken("moved", f"{self.name} was told {entry} after {before}")
                if entry.incarnation == before.incarnation:
                    raise broken("number", f"{self.name} was told {entry} after {before}")
            self.known[entry.server] = entry


class Moved:
    """Servers, workers, and the rendezvous."""

    def __init__(self, world: World) -> None:
        self.world, chance = world, world.chance
        self.server_num = chance.randrange(1, 4)
        self.directory: Directory | None = Directory(self.server_num)
        #: changes when the rendezvous restarts: late messages are lost
        self.memory = 0
        self.newest: dict[int, _ServerProcess] = {}
        self.processes: list[_ServerProcess] = []
        self.workers = [_AskingWorker(f"worker {n}") for n in range(chance.randrange(1, 4))]
        self.accidents = chance.randrange(0, 12)

    def run(self) -> None:
        """Run it; raises a violation."""
        world, chance = self.world, self.world.chance
        for server in range(self.server_num):
            world.at(0.0, self._start, server)
        for worker in self.workers:
            world.at(chance.random(), self._ask, worker)
        for _ in range(self.accidents):
            accident = chance.choice((self._kill, self._pause, self._forget, self._cut))
            world.at(chance.random() * _BUSY_S, accident)
        world.run()
        self._look()

    @property
    def is_busy(self) -> bool:
        """True while accidents may happen, and messages may be late."""
        return self.world.now < _BUSY_S

    def _later(self, act: object, *arguments: object) -> None:
        within = _DELAY_S if self.is_busy else 0.1
        self.world.later(act, *arguments, within=within)  # type: ignore[arg-type]

    # -- the engine

    def _start(self, server: int) -> None:
        process = _ServerProcess(f"process {len(self.processes)}", server, len(self.processes))
        self.processes.append(process)
        self.newest[server] = process
        self.world.tell("engine", f"starts {process.name} of server {server}")
        self._announce(process)

    def _replace(self, process: _ServerProcess) -> None:
        """The engine restarts a server, if no later process of it runs."""
        if self.newest[process.server] is process:
            self._start(process.server)

    def _some(self) -> _ServerProcess | None:
        running = [one for one in self.processes if one.state == RUNNING]
        return self.world.chance.choice(running) if running else None

    def _kill(self) -> None:
        process = self._some()
        if process is not None:
            self._end(process, "is killed")

    def _end(self, process: _ServerProcess, why: str) -> None:
        self.world.tell(process.name, why)
        process.state = DEAD
        # the host may be lost, too, and then no connection ends
        if self.world.chance.random() < 0.7:
            self._later(self._lose, self.memory, process)
        self._later(self._replace, process)

    def _pause(self) -> None:
        """The process stands still, and the engine believes that it is lost."""
        process = self._some()
        if process is None:
            return
        self.world.tell(process.name, "pauses")
        process.state = PAUSED
        self._later(self._replace, process)
        wakes_in = self.world.chance.random() * 3 * SILENCE_S
        self.world.at(self.world.now + wakes_in, self._wake, process)

    def _wake(self, process: _ServerProcess) -> None:
        self.world.tell(process.name, "wakes up")
        process.state = RUNNING
        self._announce(process)

    def _cut(self) -> None:
        """The link of a server to the rendezvous is cut for a while."""
        process = self._some()
        if process is None:
            return
        self.world.tell(process.name, "is cut off")
        process.is_cut = True
        self._later(self._lose, self.memory, process)
        end = self.world.now + self.world.chance.random() * 2 * SILENCE_S
        self.world.at(end, self._join_again, process)

    def _join_again(self, process: _ServerProcess) -> None:
        process.is_cut = False

    # -- the rendezvous

    def _forget(self) -> None:
        """The rendezvous ends, and another one starts without memory."""
        self.world.tell("rendezvous", "loses its memory")
        self.memory += 1
        self.directory = None
        self._later(self._open)

    def _open(self) -> None:
        if self.directory is None:
            self.directory = Directory(self.server_num)

    def _lose(self, memory: int, process: _ServerProcess) -> None:
        if memory == self.memory and self.directory is not None:
            self.directory.lose(process.name)

    # -- a server

    def _announce(self, process: _ServerProcess) -> None:
        if process.state != RUNNING or self._is_over:
            return
        self.world.at(self.world.now + _EVERY_S, self._announce, process)
        if not process.is_cut:
            message = Announce(process.server, process.incarnation, "10.0.0.1", 7000)
            self._later(self._arrive, self.memory, process, message)

    @property
    def _is_over(self) -> bool:
        return self.world.now > _BUSY_S + _QUIET_S

    def _arrive(self, memory: int, process: _ServerProcess, message: Announce) -> None:
        if self.directory is None or memory != self.memory or process.state == DEAD:
            return
        now = self.world.now
        try:
            incarnation = self.directory.announce(process.name, message, now)
        except OccupiedError:
            process.asks_since = now if process.asks_since is None else process.asks_since
            if now - process.asks_since > OCCUPIED_S:
                self._later(self._refuse, process)
        except MembershipError:
            self._later(self._refuse, process)
        else:
            process.asks_since = None
            self._later(self._number, process, incarnation)

    def _refuse(self, process: _ServerProcess) -> None:
        if process.state == RUNNING:
            self._end(process, "is refused")

    def _number(self, process: _ServerProcess, incarnation: int) -> None:
        # replies of one connection arrive in order
        process.incarnation = max(process.incarnation, incarnation)

    # -- a worker

    def _ask(self, worker: _AskingWorker) -> None:
        if self._is_over:
            return
        self.world.at(self.world.now + 2 * _EVERY_S, self._ask, worker)
        if self.directory is None:
            return
        # one connection: the answer arrives before the next question
        self.directory.learn(worker.known.values())
        if not self.directory.missing():
            worker.hear(self.directory.entries())

    def _look(self) -> None:
        """After a quiet time, one process of each server runs, and all workers know it."""
        for server in range(self.server_num):
            of_server = [one for one in self.processes if one.server == server]
            # others may still ask for an index that is taken
            running = [one for one in of_server if one.state == RUNNING and one.incarnation]
            if len(running) != 1:
                raise broken("one", f"server {server} has {running}")
            for worker in self.workers:
                told = worker.known.get(server)
                if told is None or told.process != running[0].name:
                    raise broken("found", f"{worker.name} knows {told}, but {running[0]} runs")
