# SPDX-License-Identifier: Apache-2.0
"""A schedule of a job that workers join and leave: drawn, run, and checked at the end."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from tests.chaos.simulation.elastic.host import ElasticHost
from tests.chaos.simulation.elastic.oracle import ElasticOracle
from tests.chaos.simulation.elastic.script import ElasticScript, draw
from tests.chaos.simulation.elastic.worker import ElasticWorker
from tests.chaos.simulation.locks import Threading
from tests.chaos.simulation.oracle import broken
from tests.chaos.simulation.world import World

from fleetlight.fleet.checkpoints import worker_state
from fleetlight.fleet.served import shard_queue
from fleetlight.fleet.served.elastic import join_state
from fleetlight.ps.worker import served_group

#: no schedule takes so long, and what one death of a server takes
_LIMIT_S, _MOMENTS, _WRITES = 1000.0, 250, 8


@contextlib.contextmanager
def worker_machinery() -> Iterator[None]:
    """Replace what surrounds the code of a worker."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (shard_queue, "in_main_thread", lambda: True),
            (join_state, "saved_values", lambda job, purpose: {"step": job.step}),
            (worker_state, "parts", lambda job, purpose: ()),
            # heartbeats are events here
            (served_group, "threading", Threading()),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class Elastic:
    """Servers, workers that come and go, and their failures."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.script: ElasticScript = draw(world.chance)
        self.oracle = ElasticOracle(self.script)
        self.hosts = [
            ElasticHost(world, n, self.script, self.oracle) for n in range(self.script.servers)
        ]
        self.workers = [self._worker(n) for n in range(self.script.workers)]

    def _worker(self, index: int | None) -> ElasticWorker:
        started_at = len(self.oracle.processes) + 1
        return ElasticWorker(self.world, index, started_at, self.script, self.oracle, self.hosts)

    def run(self) -> None:
        """Run until no event is left; raises a violation."""
        world, script = self.world, self.script
        world.nervous, world.delay_s = script.nervous, script.delay_s
        world.is_timed, world.most_events = True, 100_000
        for host in self.hosts:
            world.at(0.0, host.start)
        for worker in self.workers:
            world.later(worker.start)
        for times, act in (
            (script.joins, self._join),
            (script.leaves, self._leave),
            (script.deaths, self._die),
            (script.breaks, self._break),
            (script.cuts, self._cut),
            (script.server_deaths, self._plan_death),
            (script.snapshots, self._snapshot),
        ):
            for time in times:
                world.at(time, act)
        world.at(_LIMIT_S, self._look_for_waits)
        with worker_machinery():
            world.run()
        self._look()

    def _some(self) -> ElasticWorker | None:
        running = [worker for worker in self.workers if not worker.is_gone]
        return self.world.chance.choice(running) if running else None

    def _join(self) -> None:
        worker = self._worker(None)
        self.workers.append(worker)
        worker.start()

    def _leave(self) -> None:
        if (worker := self._some()) is not None:
            worker.asked_to_leave()

    def _die(self) -> None:
        if (worker := self._some()) is not None:
            worker.dies()

    def _break(self) -> None:
        if (worker := self._some()) is not None:
            worker.breaks()

    def _cut(self) -> None:
        if (worker := self._some()) is not None:
            chance = self.world.chance
            worker.cut(chance.randrange(len(self.hosts)), chance.random() * 20)

    def _plan_death(self) -> None:
        chance = self.world.chance
        host = chance.choice(self.hosts)
        if chance.random() < 0.5:
            host.moments_left = chance.randrange(_MOMENTS)
        else:
            host.writes_left = 1 + chance.randrange(_WRITES)

    def _snapshot(self) -> None:
        self.world.chance.choice(self.hosts).snapshot()

    def _look_for_waits(self) -> None:
        waiting = [worker for worker in self.workers if not worker.is_gone]
        if waiting:
            raise broken("waiting", f"{waiting} do")
        for host in self.hosts:
            if not host.is_over:
                raise broken("waiting", f"{host} does")

    def _look(self) -> None:
        self.oracle.check_end(
            [host.rows.counts for host in self.hosts], [host.rows.groups for host in self.hosts]
        )
