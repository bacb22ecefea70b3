# SPDX-License-Identifier: Apache-2.0
"""`ElasticHost`: a server of a job that workers join and leave; it gives up lost workers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.chaos.simulation.elastic.oracle import ElasticOracle
from tests.chaos.simulation.elastic.script import ElasticScript
from tests.chaos.simulation.host import Host, Link
from tests.chaos.simulation.oracle import broken
from tests.chaos.simulation.values import Rows
from tests.chaos.simulation.world import World

from fleetlight.errors import FleetError
from fleetlight.ps import messages as m

#: how long a server waits for a worker, and a restarted one for those that it knows
DEADLINE_S, AWAY_S = 200.0, 60.0


class PushRows(Rows):
    """One row for each push: how often it was applied, and with which others."""

    def __init__(self, plan: Any, witness: Any) -> None:
        super().__init__(plan, witness)
        self._servers = plan.server_num
        #: by push: the pushes of its step
        self.groups: dict[int, frozenset[int]] = {}

    def step(self, optimizer: int, options: Any, step: int, gradients: Any) -> None:
        """Add, and note the group."""
        for part in gradients.tables.values():
            group = frozenset(one // self._servers for one in part.ids.tolist())
            self._witness(set(group))
            for one, row in zip(part.ids.tolist(), part.rows, strict=True):
                self.rows[one] = self.rows.get(one, 0) + row * len(group)
                self.groups[one // self._servers] = group

    @property
    def counts(self) -> dict[int, float]:
        """How often each push was applied."""
        return {one // self._servers: float(row[0]) for one, row in self.rows.items()}

    def cut(self, *, ordered: bool = True) -> Any:
        """As it is now."""
        return dict(self.rows), dict(self.groups)

    def load(self, message: Any, folder: Any, *, whole: bool = False) -> None:
        """The saved rows."""
        rows, groups = folder.disk.rows[folder.first]
        self.rows, self.groups = dict(rows), dict(groups)


class ElasticHost(Host):
    """A server that waits from its start until all workers have left."""

    rows_kind = PushRows
    durable = dataclasses.replace(Host.durable, away_s=AWAY_S)
    deadline_s = DEADLINE_S
    oracle: ElasticOracle
    script: ElasticScript

    def __init__(
        self, world: World, index: int, script: ElasticScript, oracle: ElasticOracle
    ) -> None:
        super().__init__(world, index, script, oracle)  # type: ignore[arg-type]
        self.places = script.places
        #: all workers have left, and the process has ended
        self.is_over = False
        self._is_closing = False
        #: snapshots in progress
        self._snapshots = 0

    def _serve(self) -> None:
        super()._serve()
        serving = self.server
        assert serving is not None
        try:
            serving.wait()
        except FleetError as error:
            raise broken("cause", f"{self} ended with {error}") from error
        self._is_closing = True
        while self._snapshots:
            # `close` waits for the thread that writes it
            self.world.sleep(1.0)
        serving.close()
        self.is_over = True
        self.world.tell(str(self), "ends")
        if self.disk.files:
            raise broken("left", f"{self} has left files {sorted(self.disk.files)}")

    def die(self) -> None:
        """Die as by SIGKILL."""
        if not self.is_over:
            super().die()
            self._is_closing, self._snapshots = False, 0

    def hear(self, link: Link, message: m.Message, arrays: Sequence[Any]) -> None:
        """An event: a request arrives, perhaps after the process has ended."""
        if self.is_over:
            self.world.later(link.lane.broke, link)
        else:
            super().hear(link, message, arrays)

    def snapshot(self) -> None:
        """An event: the rows are written, unless the server ends."""
        serving = self.server
        if serving is None or serving._durability is None or self._is_closing:
            return
        write = serving._durability.snapshot

        def act() -> None:
            self._snapshots += 1
            write()
            self._snapshots -= 1

        self.world.tell(str(self), "takes a snapshot")
        self.world.spawn(self, f"{self}, a snapshot", act)

    def makes(self, columns: set[int]) -> None:
        """A step is made of these pushes."""
        if self.server is not None and self.server.is_open:
            self.oracle.made(self.index, frozenset(columns))

    def _check_reply(self, serving: Any, link: Link, message: m.Message, reply: m.Message) -> None:
        worker: Any = link.lane.worker
        if isinstance(reply, m.Entered) and reply.is_member:
            self.oracle.entered(self.index, worker)
        if isinstance(reply, m.Pulled) and isinstance(message, m.Pull) and message.at_least:
            counts = self.rows.counts
            self.oracle.waited(self.index, counts, worker, message.phase, message.at_least)

    def read(self, pushes: list[int]) -> list[float]:
        """How often it has applied these pushes."""
        ids = np.array([push * self.script.servers + self.index for push in pushes], np.int64)
        return [float(row[0]) for row in self.rows.read(ids)]
