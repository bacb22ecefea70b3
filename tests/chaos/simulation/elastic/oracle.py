# SPDX-License-Identifier: Apache-2.0
"""`ElasticOracle`: the promises of a job that workers join and leave."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tests.chaos.simulation.elastic.script import ElasticScript
from tests.chaos.simulation.oracle import broken
from tests.chaos.simulation.script import SYNC

if TYPE_CHECKING:
    from tests.chaos.simulation.elastic.worker import ElasticWorker

#: an epoch, and a record of it
Record = tuple[int, int]


@dataclasses.dataclass(eq=False)
class TrackedPush:
    """One step of one process."""

    number: int
    process: ElasticWorker
    records: Sequence[Record]
    phase: int
    #: its number among the steps of the process in the phase
    order: int
    is_acknowledged: bool = False

    def __str__(self) -> str:
        return f"push {self.number} of {self.process} (phase {self.phase}, {self.order})"


class ElasticOracle:
    """Knows who takes part, which records were trained, and in which steps."""

    def __init__(self, script: ElasticScript) -> None:
        self.script = script
        self.processes: list[ElasticWorker] = []
        self.pushes: dict[int, TrackedPush] = {}
        #: records that a worker has reported as finished, and which worker
        self._reported: dict[Record, ElasticWorker] = {}
        #: by turn: its phase
        self._phases: dict[int, int] = {}
        #: by epoch: number and members of the barrier after it
        self._meetings: dict[int, tuple[int, list[int]]] = {}
        #: by place: the process that takes part there
        self._places: dict[int, ElasticWorker] = {}
        #: by server and place: the newest process that the server has entered
        self._entered: dict[tuple[int, int], int] = {}

    # -- membership

    def takes_part(self, process: ElasticWorker) -> None:
        """Server 0 has entered a process, or it starts with the job."""
        before = self._places.get(process.index)
        if before is not None and before is not process and before.must_be_counted:
            raise broken("place", f"{process} takes the place of {before}, which takes part")
        self._places[process.index] = process

    def entered(self, server: int, process: ElasticWorker) -> None:
        """A server has entered a process."""
        self._entered[server, process.index] = process.started_at
        if server == 0:
            self.takes_part(process)

    def met(self, process: ElasticWorker, epoch: int, number: int, members: list[int]) -> None:
        """A process got the reply of the barrier after an epoch."""
        known = self._meetings.setdefault(epoch, (number, members))
        if known != (number, members):
            raise broken(
                "barrier",
                f"{process} was told barrier {number} of {members} after epoch {epoch}, "
                f"another worker {known}",
            )
        for other in self.processes:
            is_due = other.first_epoch is not None and other.first_epoch <= epoch
            if is_due and other.must_be_counted and other.started_at not in members:
                raise broken("member", f"the barrier after epoch {epoch} was without {other}")
            if not is_due and other.started_at in members:
                raise broken("member", f"{other} was in the barrier after epoch {epoch}")

    # -- steps

    def pushes_now(
        self, process: ElasticWorker, records: Sequence[Record], turn: int, phase: int, order: int
    ) -> TrackedPush:
        """A process is about to push its gradients of these records."""
        if self._phases.setdefault(turn, phase) != phase:
            raise broken(
                "phase",
                f"{process} trains in turn {turn} in phase {phase}, another worker in phase "
                f"{self._phases[turn]}",
            )
        for record in records:
            by = self._reported.get(record)
            if by is not None:
                raise broken("lease", f"{process} trains {record}, which {by} has finished")
        number = len(self.pushes) + 1
        push = TrackedPush(number, process, records, phase, order)
        self.pushes[number] = push
        return push

    def reports(self, process: ElasticWorker, records: Iterable[Record]) -> None:
        """Server 0 knows that a process has finished these records."""
        for record in records:
            self._reported.setdefault(record, process)

    def made(self, server: int, group: frozenset[int]) -> None:
        """A server makes a step of these pushes."""
        pushes = [self.pushes[number] for number in group]
        for push in pushes:
            newest = self._entered.get((server, push.process.index), 0)
            if newest > push.process.started_at:
                raise broken("fence", f"server {server} applies {push}, but its place is taken")
        if len({(push.phase, push.order) for push in pushes}) > 1:
            raise broken("step", f"server {server} made a step of {[str(p) for p in pushes]}")
        if len({push.process.index for push in pushes}) < len(pushes):
            raise broken("step", f"server {server} made a step of {[str(p) for p in pushes]}")

    def waited(
        self, server: int, counts: Mapping[int, float], asks: ElasticWorker, phase: int, least: int
    ) -> None:
        """A server lets a worker read that requires so many steps of all workers."""
        steps: dict[ElasticWorker, int] = defaultdict(int)
        for push in self.pushes.values():
            if push.phase == phase and counts.get(push.number, 0) > 0.5:
                steps[push.process] += 1
        for other in self.processes:
            if other.must_step_in(phase) and steps[other] < least:
                raise broken(
                    "stale",
                    f"server {server} let {asks} read after {least} steps of all workers in "
                    f"phase {phase}, but {other} has made {steps[other]}",
                )

    # -- the end

    def check_end(
        self, counts: Sequence[Mapping[int, float]], groups: Sequence[Mapping[int, frozenset[int]]]
    ) -> None:
        """All workers have left: compare what the servers have with what was to be trained."""
        for server, applied in enumerate(counts):
            self._check_pushes(server, applied)
            self._check_records(server, applied)
        if self.script.mode == SYNC:
            self._check_groups(groups)

    def _check_pushes(self, server: int, applied: Mapping[int, float]) -> None:
        for push in self.pushes.values():
            times = applied.get(push.number, 0)
            allowed = (1,) if push.is_acknowledged else (0, 1)
            if min(abs(times - one) for one in allowed) > 1e-3:
                raise broken("once", f"server {server} has {push} {times:g} times")

    def _check_records(self, server: int, applied: Mapping[int, float]) -> None:
        by_record: dict[Record, list[TrackedPush]] = defaultdict(list)
        for push in self.pushes.values():
            if applied.get(push.number, 0) > 0.5:
                for record in push.records:
                    by_record[record].append(push)
        for epoch in range(self.script.epochs):
            for number in range(self.script.records):
                found = by_record[epoch, number]
                steady = [push for push in found if not push.process.may_repeat]
                lost = {push.process for push in found if push.process.may_repeat}
                if not found or len(steady) > 1 or len(found) > len(steady) + len(lost):
                    pushes = ", ".join(str(push) for push in found) or "no push"
                    raise broken(
                        "record",
                        f"server {server} has record {number} of epoch {epoch} by {pushes}",
                    )

    def _check_groups(self, groups: Sequence[Mapping[int, frozenset[int]]]) -> None:
        by_place: dict[tuple[int, int], set[frozenset[int]]] = defaultdict(set)
        for push in self.pushes.values():
            if not push.process.may_repeat:
                for made in groups:
                    by_place[push.phase, push.order].add(self._steady(made[push.number]))
        for (phase, order), made in by_place.items():
            if len(made) > 1:
                listed = " and ".join(str(sorted(group)) for group in made)
                raise broken("step", f"step {order} of phase {phase} has the pushes {listed}")

    def _steady(self, group: frozenset[int]) -> frozenset[int]:
        return frozenset(n for n in group if not self.pushes[n].process.may_repeat)
