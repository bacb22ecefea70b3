# SPDX-License-Identifier: Apache-2.0
"""`Kept`: what of a server outlives it, put together and taken apart."""

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
from fleetlight.ps.server.attendance import Attendance
from fleetlight.ps.server.chronicle import Chronicle
from fleetlight.ps.server.durability import Rows, Written
from fleetlight.ps.server.gate import Gate
from fleetlight.ps.server.keeping import Keeping
from fleetlight.ps.server.meetings import Meetings
from fleetlight.ps.server.pushes import Pushes
from fleetlight.ps.server.work import Work
from fleetlight.ps.tables.dense_state import DenseState
from fleetlight.ps.tables.holdings import Holdings
from fleetlight.ps.tables.unpacking import Unpacking

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Kept:
    """The parts of a server that change while it serves."""

    holdings: Holdings
    pushes: Pushes
    keeping: Keeping
    meetings: Meetings[list[Array]]
    work: Work
    attendance: Attendance
    gate: Gate
    chronicle: Chronicle

    def of_others(self) -> Kept:
        """As in `Values`."""
        attendance = copy.copy(self.attendance)
        # those that are here meet meanwhile
        with attendance.news:
            attendance.roster = copy.deepcopy(attendance.roster)
            meetings, work = copy.deepcopy(self.meetings), copy.deepcopy(self.work)
        return dataclasses.replace(self, meetings=meetings, work=work, attendance=attendance)

    def standing(self) -> list[Written]:
        """As in `Values`."""
        dense = self.holdings.dense.state()
        with self.attendance.news:
            ledger, steps, releases = self.pushes.standing()
            gone, lives = self.attendance.roster.gone(), self.attendance.roster.lives()
            held, met = self.pushes.held_now(), self.meetings.last
            work = self.work.state()
        standing = c.Baseline(
            ledger,
            steps,
            releases,
            gone,
            self.holdings.has_values,
            dense.state,
            dense.scalars,
            work,
            self.holdings.shrunk(),
            lives,
        )
        written: list[Written] = [(standing, [*dense.values, *dense.arrays]), *held]
        if met is not None:
            meeting, operation, brought = met
            written.append(met_change(meeting, operation, brought))
        return written

    def restore(self, standing: c.Baseline, arrays: Sequence[Array], *, is_last: bool) -> None:
        """As in `Values`."""
        unpacking = Unpacking(arrays, "dense state in the journal")
        values = unpacking.blocks(self.holdings.blocks())
        state = DenseState(values, standing.state, standing.scalars, unpacking.rest())
        self.holdings.restore(state, has_values=standing.has_values)
        self.pushes.restore(standing, is_last=is_last)
        self.attendance.roster.outlive(standing.gone)
        self.attendance.roster.know(standing.lives)
        self.work.restore(standing.work)
        self.holdings.remember_shrunk(standing.shrunk)

    def load(self, files: Sequence[TableFile], folder: Path) -> None:
        """As in `Values`."""
        named = [(file.table, file.name) for file in files]
        sums = {file.name: (file.bytes, file.sha256) for file in files}
        message = Load(str(folder), named, epoch=0, sums=sums)
        with ThreadPoolExecutor(1, "fleet-check") as beside:
            checked = beside.submit(self.holdings.check, message, folder, whole=True)
            try:
                self.holdings.load(message, folder, whole=True)
            finally:
                # it says more of a file that is damaged
                checked.result()

    def redo(self, change: c.Change, arrays: Sequence[Array]) -> None:
        """As in `Values`."""
        if isinstance(change, (c.StepApplied, c.StepHeld, c.HeldStepApplied, c.DifferencesAdded)):
            self.pushes.redo(change, arrays)
        elif isinstance(change, Fill):
            self.holdings.fill(change, arrays)
        elif isinstance(change, c.RowsSeen):
            self.holdings.table(change.table).pull(arrays[0], True, change.step)
        elif isinstance(change, Shrink):
            self.holdings.shrink(change)
        elif isinstance(change, c.PhaseEnded):
            self.pushes.end(change.worker, change.phase)
        elif isinstance(change, c.WorkerLeft):
            # `Company.begin` has the meetings do without it
            self.attendance.roster.outlive([(change.worker, change.incarnation, change.lost)])
            self.pushes.leave(change.worker)
        elif isinstance(change, c.WorkerJoined):
            life = change.worker, change.incarnation, change.life
            self.attendance.roster.know([life])
        elif isinstance(change, c.LeasesFreed):
            self.work.release(change.worker)
        elif isinstance(change, c.LeaseChanged):
            self._ask_again(change)
        else:
            assert isinstance(change, c.BarrierPassed), change
            self.meetings.restore(change.meeting, change.operation, apart(change, arrays))

    def _ask_again(self, change: c.LeaseChanged) -> None:
        if isinstance(change.message, LeaseRequest):
            self.work.deal(change.worker, change.message)
        else:
            self.work.reach(change.worker, change.message)

    def forget_workers(self) -> None:
        """As in `Values`."""
        self.pushes.forget_workers()
        self.holdings.remember_shrunk(())

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """As in `Values`."""
        with self.gate.alone(), self.chronicle.turn, self.attendance.news:
            yield

    def rows(self) -> Rows | None:
        """As in `Values`."""
        return self.keeping.aside()


def met_change(meeting: int, operation: str, brought: Sequence[Sequence[Array]]) -> Written:
    """A meeting, with what each worker has brought to it."""
    change = c.BarrierPassed(meeting, operation, [len(arrays) for arrays in brought])
    return change, [array for arrays in brought for array in arrays]


def apart(change: c.BarrierPassed, arrays: Sequence[Array]) -> list[list[Array]]:
    """The way back: by worker, in memory of its own."""
    left = iter(arrays)
    return [[next(left).copy() for _ in range(count)] for count in change.counts]
