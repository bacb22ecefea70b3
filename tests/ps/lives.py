# SPDX-License-Identifier: Apache-2.0
"""A server in one process that dies and is started again on what it has kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ps.serving import (
    Worker,
    closed_server,
    open_up,
    team,
    together,
)

from fleetlight.ps import messages as m
from fleetlight.ps.journal.journal import NEVER, Policy
from fleetlight.ps.plan import Plan
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.server import Server

IDS = list(range(-3, 5))


class Lives:
    """A server, its workers, and the folder that outlives it."""

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

    def die(self, back: Sequence[int] = (0, 1)) -> None:
        """As by SIGKILL: what the system has not got is gone; then the next life.

        `back`: the workers that call again.
        """
        durability = self.durability
        durability._over.set()
        durability._snapshots.join()
        durability._folder._lock.release()
        self.server = self._start()
        workers = self.plan.worker_num
        before = [worker for worker in self.workers if worker.index in back]
        self.workers = [Worker(self.server, worker.index, workers) for worker in before]
        for worker, old in zip(self.workers, before, strict=True):
            worker.sequence = old.sequence

    def send(self, messages: list[m.Push], gradients: dict[int, Any]) -> list[Any]:
        """Each worker its message, at the same time."""
        pairs = zip(self.workers, messages, strict=True)
        return together(*(lambda w=w, p=p: w.send(p, gradients, None) for w, p in pairs))

    def end(self) -> None:
        self.server.close()


def rows(server_worker: Worker, table: int = 0) -> list[float]:
    return server_worker.pull(table, IDS, insert=False)
