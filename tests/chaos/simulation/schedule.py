# SPDX-License-Identifier: Apache-2.0
"""A schedule of servers and workers: drawn, run, and checked at the end."""

import copy
import dataclasses

import numpy as np
from tests.chaos.simulation.host import DEADLINE_S, Host
from tests.chaos.simulation.oracle import Oracle, broken
from tests.chaos.simulation.script import Script, draw
from tests.chaos.simulation.worker import Redo, Worker
from tests.chaos.simulation.world import World

#: the usual time of accidents; and the moments, or writes, that an incarnation has left
_BUSY, _MOMENTS, _WRITES = 40.0, 250, 8


@dataclasses.dataclass
class Served:
    """Servers, workers and their failures."""

    world: World

    def __post_init__(self) -> None:
        world = self.world
        self.script: Script = draw(world.chance)
        self.oracle = Oracle(self.script)
        self.hosts = [Host(world, n, self.script, self.oracle) for n in range(self.script.servers)]
        self.workers = [self._worker(n) for n in range(self.script.workers)]

    def _worker(self, index: int, redo: Redo | None = None) -> Worker:
        return Worker(self.world, index, self.script, self.oracle, self.hosts, redo)

    def run(self) -> None:
        """Run until no event is left; raises a violation."""
        world, script, chance = self.world, self.script, self.world.chance
        world.nervous = script.nervous
        for host in self.hosts:
            world.at(0.0, host.start)
        for worker in self.workers:
            world.later(worker.start, within=5.0)
        for _ in range(script.breaks):
            world.at(chance.random() * _BUSY, chance.choice(self.workers).breaks)
        for _ in range(script.deaths):
            world.at(chance.random() * _BUSY, self._plan_death)
        for _ in range(script.snapshots):
            world.at(chance.random() * _BUSY, chance.choice(self.hosts).snapshot)
        if script.loses_worker:
            world.at(chance.random() * _BUSY, chance.choice(self.workers).dies)
        if script.returns_worker:
            world.at(chance.random() * _BUSY, self._return)
        if script.doubles_worker:
            world.at(chance.random() * _BUSY, self._double)
        if script.ends_badly:
            # a wait for a worker that never comes must end in an error
            world.patience = 2 * DEADLINE_S
        world.run()
        self._look()

    def _plan_death(self) -> None:
        chance = self.world.chance
        host = chance.choice(self.hosts)
        if chance.random() < 0.5:
            host.moments_left = chance.randrange(_MOMENTS)
        else:
            host.writes_left = 1 + chance.randrange(_WRITES)

    def _return(self) -> None:
        """Servers wait for it; at times they die with it, and know none of its connections."""
        lost = self.world.chance.choice(self.workers)
        if lost.has_finished:
            return
        if self.world.chance.random() < 0.3:
            for host in self.hosts:
                host.die()
        lost.dies()
        redo = copy.deepcopy(lost.redo)
        redo.incarnation += 1
        self.workers[lost.index] = again = self._worker(lost.index, redo)
        self.world.later(again.start)

    def _double(self) -> None:
        """All servers die and a worker is silent, so it is started a second time.

        The first process wakes up when the servers have died again, and know neither.
        """
        first = self.workers[0]
        first.is_asleep = True
        for host in self.hosts:
            host.die()
        second = self._worker(0, Redo(2, [0] * len(self.hosts)))
        self.workers.append(second)
        self.world.later(second.start)
        self.world.at(self.world.now + self.world.chance.random() * 2 * _BUSY, self._wake, first)

    def _wake(self, worker: Worker) -> None:
        worker.is_asleep = False
        for host in self.hosts:
            host.die()

    def _look(self) -> None:
        for worker in self.workers:
            if not worker.is_gone:
                raise broken("waiting", f"{worker} does")
        for host in self.hosts:
            self._compare(host)
        if all(worker.has_finished for worker in self.workers):
            for host in self.hosts:
                self.world.at(self.world.now, host.end)
            self.world.run()

    def _compare(self, host: Host) -> None:
        if host.server is None:
            raise broken("waiting", f"{host} does not come back")
        ids = sorted({one for update in self.oracle.updates for one in update.ids[host.index]})
        rows = host.rows.read(np.array(ids, np.int64))
        self.oracle.read(host.index, ids, rows, self.oracle.floors(ids), "the end")
