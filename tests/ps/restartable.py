# SPDX-License-Identifier: Apache-2.0
"""A server and its workers in one process; the server crashes and restarts on its folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ps.serving import Worker, closed_server, open_up, team, together

from fleetlight.ps import messages as m
from fleetlight.ps.journal.journal import NEVER, Policy
from fleetlight.ps.plan import Plan
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.server import Server

IDS = list(range(-3, 5))


class RestartableCluster:
    """A server, its workers, and the folder from which the server restarts."""

    def __init__(self, folder: Path, the_plan: Plan, **more: Any) -> None:
        self.folder, self.plan = folder, the_plan
        self.durable = Durable(folder, job="a job", policy=Policy(sync=NEVER), **more)
        self.server = self._start()
        self.workers = team(self.server, the_plan.worker_num)

    def _start(self) -> Server:
        server = closed_server(self.plan.worker_num)
        open_up(server, self.plan, self.durable)
        return server

    @property
    def durability(self) -> Durability:
        assert self.server._durability is not None
        return self.server._durability

    def restart(self, returning: Sequence[int] = (0, 1)) -> None:
        """Crash as by SIGKILL, losing what is not in the page cache, and restart the server.

        `returning`: the workers that connect again.
        """
        durability = self.durability
        durability._over.set()
        durability._snapshots.join()
        durability._folder._lock.release()
        self.server = self._start()
        workers = self.plan.worker_num
        before = [worker for worker in self.workers if worker.index in returning]
        self.workers = [Worker(self.server, worker.index, workers) for worker in before]
        for worker, previous in zip(self.workers, before, strict=True):
            worker.sequence = previous.sequence

    def send(self, messages: list[m.Push], gradients: dict[int, Any]) -> list[Any]:
        """All workers send their messages at the same time."""
        pairs = zip(self.workers, messages, strict=True)
        return together(*(lambda w=w, p=p: w.send(p, gradients, None) for w, p in pairs))

    def close(self) -> None:
        self.server.close()


def rows(server_worker: Worker, table: int = 0) -> list[float]:
    return server_worker.pull(table, IDS, insert=False)
