# SPDX-License-Identifier: Apache-2.0
"""`HighWaterMarks`: which pushes a server has applied, so that it applies each once. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from fleetlight.errors import PlanError, ProtocolError

#: worker, incarnation, the last sequence number applied
Mark = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _AppliedMark:
    incarnation: int
    sequence: int


class HighWaterMarks:
    """The last sequence number of each worker; its pushes come in order, so one number is enough.

    Another process in the worker's place, which has a later incarnation, counts anew; earlier ones
    are refused from then on. A process that goes on where an earlier life of the worker was has the
    same incarnation, and goes on counting.
    """

    epoch: int

    def __init__(self, epoch: int = 0, marks: Iterable[Mark] = ()) -> None:
        self.restore(epoch, marks)

    def is_new(self, worker: int, incarnation: int, epoch: int, sequence: int) -> bool:
        """False when the push has been applied; an error when it may not be applied at all."""
        if epoch != self.epoch:
            raise ProtocolError(
                f"worker {worker} pushed for epoch {epoch}, but this server is in epoch "
                f"{self.epoch}: a checkpoint was loaded in between, every worker must take part"
            )
        last = self._last.get(worker)
        if last is None or last.incarnation < incarnation:
            return True
        if last.incarnation > incarnation:
            raise ProtocolError(
                f"there are two workers {worker}: one that was started at {last.incarnation} has "
                f"pushed, but one that was started at {incarnation} still pushes; end the older "
                "process"
            )
        return sequence > last.sequence

    def check_has(self, worker: int, incarnation: int, acknowledged: int) -> None:
        """Refuse to go on with older values than a worker was told of."""
        last = self._last.get(worker)
        known = last.sequence if last is not None and last.incarnation == incarnation else 0
        if known < acknowledged:
            raise ProtocolError(
                f"this server came back older than it was: it has acknowledged push {acknowledged} "
                f"of worker {worker}, but push {known} is the last one that it has. Was its folder "
                "put back from an older copy, or did its machine stop before all was on the disk? "
                "Start all processes again, as fleetrun does with --max_restarts"
            )

    def applied(self, worker: int, incarnation: int, sequence: int) -> None:
        """The push is part of the values from now on."""
        self._last[worker] = _AppliedMark(incarnation, sequence)

    def last(self, worker: int, incarnation: int) -> int:
        """The last sequence number of a worker, 0 where nothing of it was applied."""
        mark = self._last.get(worker)
        return 0 if mark is None or mark.incarnation != incarnation else mark.sequence

    def begin(self, epoch: int) -> None:
        """A checkpoint was loaded: what was made for the values before is refused."""
        if epoch <= self.epoch:
            raise ProtocolError(
                f"a checkpoint was to begin epoch {epoch}, but this server is in epoch "
                f"{self.epoch}; epochs only grow"
            )
        self.epoch = epoch

    def restore(self, epoch: int, marks: Iterable[Mark]) -> None:
        """Go on from numbers that were kept with the values."""
        self.epoch = epoch
        self._last = {
            worker: _AppliedMark(incarnation, number) for worker, incarnation, number in marks
        }

    def marks(self) -> list[Mark]:
        """The numbers to keep with the values."""
        return [(w, last.incarnation, last.sequence) for w, last in sorted(self._last.items())]


def common_epoch(epochs: Mapping[int, int]) -> int:
    """The epoch of all servers: a checkpoint is loaded by all of them, or by none."""
    for server, epoch in epochs.items():
        if epoch != epochs[0]:
            raise PlanError(
                f"server 0 is in epoch {epochs[0]}, server {server} in epoch {epoch}: they have "
                "loaded different checkpoints; give all of them the same, "
                "fleet.init_server(dirname)"
            )
    return epochs[0]
