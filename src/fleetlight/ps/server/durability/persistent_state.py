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
    gate: SharedExclusiveLock
    log: WriteAheadLog

    def of_others(self) -> PersistentState:
        """As in `Values`."""
        presence = copy.copy(self.presence)
        # those that are here meet meanwhile
        with presence.news:
            presence.roster = copy.deepcopy(presence.roster)
            barriers, work = copy.deepcopy(self.barriers), copy.deepcopy(self.queue)
        return dataclasses.replace(self, barriers=barriers, queue=work, presence=presence)

    def standing(self) -> list[Written]:
        """As in `Values`."""
        dense = self.state.dense.state()
        with self.presence.news:
            ledger, steps, releases = self.pushes.standing()
            gone, lives = self.presence.roster.gone(), self.presence.roster.lives()
            held, met = self.pushes.held_now(), self.barriers.last
            work = self.queue.state()
        standing = c.Baseline(
            ledger,
            steps,
            releases,
            gone,
            self.state.has_values,
            dense.state,
            dense.scalars,
            work,
            self.state.shrunk(),
            lives,
        )
        written: list[Written] = [(standing, [*dense.values, *dense.arrays]), *held]
        if met is not None:
            meeting, operation, brought = met
            written.append(barrier_change(meeting, operation, brought))
        return written

    def restore(self, standing: c.Baseline, arrays: Sequence[Array], *, is_last: bool) -> None:
        """As in `Values`."""
        unpacking = Unpacking(arrays, "dense state in the journal")
        values = unpacking.blocks(self.state.blocks())
        state = DenseState(values, standing.state, standing.scalars, unpacking.rest())
        self.state.restore(state, has_values=standing.has_values)
        self.pushes.restore(standing, is_last=is_last)
        self.presence.roster.outlive(standing.gone)
        self.presence.roster.know(standing.lives)
        self.queue.restore(standing.work)
        self.state.remember_shrunk(standing.shrunk)

    def load(self, files: Sequence[TableFile], folder: Path) -> None:
        """As in `Values`."""
        named = [(file.table, file.name) for file in files]
        sums = {file.name: (file.bytes, file.sha256) for file in files}
        message = Load(str(folder), named, epoch=0, sums=sums)
        with ThreadPoolExecutor(1, "fleet-check") as beside:
            checked = beside.submit(self.state.check, message, folder, whole=True)
            try:
                self.state.load(message, folder, whole=True)
            finally:
                # it says more of a file that is damaged
                checked.result()

    def redo(self, change: c.Change, arrays: Sequence[Array]) -> None:
        """As in `Values`."""
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
            # `Company.begin` has the barriers do without it
            self.presence.roster.outlive([(change.worker, change.incarnation, change.lost)])
            self.pushes.leave(change.worker)
        elif isinstance(change, c.WorkerJoined):
            life = change.worker, change.incarnation, change.life
            self.presence.roster.know([life])
        elif isinstance(change, c.LeasesFreed):
            self.queue.release(change.worker)
        elif isinstance(change, c.LeaseChanged):
            self._ask_again(change)
        else:
            assert isinstance(change, c.BarrierPassed), change
            self.barriers.restore(change.meeting, change.operation, by_worker(change, arrays))

    def _ask_again(self, change: c.LeaseChanged) -> None:
        if isinstance(change.message, LeaseRequest):
            self.queue.deal(change.worker, change.message)
        else:
            self.queue.reach(change.worker, change.message)

    def forget_workers(self) -> None:
        """As in `Values`."""
        self.pushes.forget_workers()
        self.state.remember_shrunk(())

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """As in `Values`."""
        with self.gate.alone(), self.log.turn, self.presence.news:
            yield

    def rows(self) -> SnapshotJob | None:
        """As in `Values`."""
        return self.checkpoints.aside()
