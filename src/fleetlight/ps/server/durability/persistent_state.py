# SPDX-License-Identifier: Apache-2.0
"""`PersistentState`: the state of a server that recovery restores."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fleetlight.ps import changes as c
from fleetlight.ps.messages import Fill, LeaseRequest, Load, Shrink, TableFile
from fleetlight.ps.server.checkpoints.checkpoint_handler import CheckpointHandler
from fleetlight.ps.server.durability.durability import SnapshotJob, Written
from fleetlight.ps.server.shard_queue.shard_queue import ShardQueue
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.workers.barriers import Barriers, barrier_change, by_worker
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.tables.dense_state import DenseState
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.tables.unpacking import Unpacking

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class PersistentState:
    """The parts of a server that change while it serves."""

    state: ServerState
    pushes: PushHandler
    checkpoints: CheckpointHandler
    barriers: Barriers[list[Array]]
    queue: ShardQueue
    presence: PresenceMonitor
    values_lock: SharedExclusiveLock
    log: WriteAheadLog

    def recovery_view(self) -> PersistentState:
        """See `DurableState`."""
        presence = copy.copy(self.presence)
        # connected workers may enter barriers during the copy
        with presence.changed:
            presence.roster = copy.deepcopy(presence.roster)
            barriers, work = copy.deepcopy(self.barriers), copy.deepcopy(self.queue)
        return dataclasses.replace(self, barriers=barriers, queue=work, presence=presence)

    def baseline(self) -> list[Written]:
        """See `DurableState`."""
        dense = self.state.dense.state()
        with self.presence.changed:
            ledger, steps, releases = self.pushes.baseline()
            gone, arrivals = self.presence.roster.gone(), self.presence.roster.arrivals()
            joining = self.presence.roster.joining()
            held, last_barrier = self.pushes.held_now(), self.barriers.last
            prelude = list(self.barriers.prelude)
            work = self.queue.state()
        baseline = c.Baseline(
            ledger,
            steps,
            releases,
            gone,
            self.state.has_values,
            dense.state,
            dense.scalars,
            work,
            self.state.shrunk(),
            arrivals,
            joining,
        )
        written: list[Written] = [(baseline, [*dense.values, *dense.arrays]), *held]
        written += [barrier_change(*one, is_prelude=True) for one in prelude]
        if last_barrier is not None and not any(last_barrier is one for one in prelude):
            written.append(barrier_change(*last_barrier))
        return written

    def restore(self, baseline: c.Baseline, arrays: Sequence[Array], *, is_last: bool) -> None:
        """See `DurableState`."""
        unpacking = Unpacking(arrays, "dense state in the journal")
        values = unpacking.blocks(self.state.blocks())
        state = DenseState(values, baseline.state, baseline.scalars, unpacking.rest())
        self.state.restore(state, has_values=baseline.has_values)
        self.pushes.restore(baseline, is_last=is_last)
        self.presence.roster.restore_gone(baseline.gone)
        self.presence.roster.restore_arrivals(baseline.arrivals, baseline.joining)
        for worker in self.presence.roster.taking_part():
            self.barriers.join(worker)
        self.queue.restore(baseline.work)
        self.barriers.has_begun = self.queue.has_begun
        self.state.remember_shrunk(baseline.shrunk)

    def load(self, files: Sequence[TableFile], folder: Path) -> None:
        """See `DurableState`."""
        named = [(file.table, file.name) for file in files]
        sums = {file.name: (file.bytes, file.sha256) for file in files}
        message = Load(str(folder), named, epoch=0, sums=sums)
        with ThreadPoolExecutor(1, "fleet-check") as beside:
            checked = beside.submit(self.state.check, message, folder, whole=True)
            try:
                self.state.load(message, folder, whole=True)
            finally:
                # the check describes a damaged file in more detail
                checked.result()

    def redo(self, change: c.Change, arrays: Sequence[Array]) -> None:
        """See `DurableState`."""
        if isinstance(change, (c.StepApplied, c.StepHeld, c.HeldStepApplied, c.DifferencesAdded)):
            self.pushes.redo(change, arrays)
        elif isinstance(change, Fill):
            self.state.fill(change, arrays)
        elif isinstance(change, c.RowsSeen):
            self.state.table(change.table).pull(arrays[0], True, change.step)
        elif isinstance(change, Shrink):
            self.state.shrink(change)
        elif isinstance(change, c.PhaseEnded):
            self.pushes.end(change.worker, change.phase)
        elif isinstance(change, c.WorkerLeft):
            # `WorkerMembership.begin` completes barriers without it
            self.presence.roster.restore_gone([(change.worker, change.started_at, change.lost)])
            self.pushes.leave(change.worker)
            self.queue.release(change.worker)
        elif isinstance(change, c.WorkerJoined):
            arrival = change.worker, change.started_at, change.incarnation
            self.presence.roster.restore_arrivals([arrival])
        elif isinstance(change, c.LeaseChanged):
            self.barriers.has_begun = True
            self._replay_lease(change)
        elif isinstance(change, c.TurnCut):
            self.queue.cut(change.loader)
        elif isinstance(change, c.WorkerEntered):
            self._replay_entry(change)
        elif isinstance(change, c.WorkerEnteredAll):
            self.queue.admissions.entered(change.worker)
        else:
            assert isinstance(change, c.BarrierPassed), change
            self.barriers.restore(
                change.meeting,
                change.operation,
                by_worker(change, arrays),
                is_prelude=change.is_prelude,
            )

    def _replay_entry(self, change: c.WorkerEntered) -> None:
        self.pushes.enter(change.worker, change.phase)
        self.presence.roster.enter(change.worker)
        self.barriers.join(change.worker)
        self.queue.join(change.worker)
        self.queue.admissions.restore({*self.queue.admissions.entering, change.worker})

    def _replay_lease(self, change: c.LeaseChanged) -> None:
        if isinstance(change.message, LeaseRequest):
            self.queue.deal(change.worker, change.message)
        else:
            self.queue.reach(change.worker, change.message)

    def forget_workers(self) -> None:
        """See `DurableState`."""
        self.pushes.forget_workers()
        self.state.remember_shrunk(())

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """See `DurableState`."""
        with self.values_lock.exclusive(), self.log.lock, self.presence.changed:
            yield

    def rows(self) -> SnapshotJob | None:
        """See `DurableState`."""
        return self.checkpoints.snapshot_job()
