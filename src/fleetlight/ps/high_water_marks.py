# SPDX-License-Identifier: Apache-2.0
"""`HighWaterMarks`: which pushes a server has applied, so that it applies each once. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from fleetlight.errors import PlanError, ProtocolError

#: worker, when it first started, the last sequence number applied
Mark = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _AppliedMark:
    started_at: int
    sequence: int


class HighWaterMarks:
    """The last sequence number of each worker; its pushes arrive in order, so one number suffices.

    A process that replaces a worker has a later first start and counts from one; earlier
    ones are refused from then on. A worker that resumes keeps its first start and
    continues to count.
    """

    epoch: int

    def __init__(self, epoch: int = 0, marks: Iterable[Mark] = ()) -> None:
        self.restore(epoch, marks)

    def is_new(self, worker: int, started_at: int, epoch: int, sequence: int) -> bool:
        """False for a push that is already applied; raise for one that must not be applied."""
        if epoch != self.epoch:
            raise ProtocolError(
                f"worker {worker} pushed for epoch {epoch}, but this server is in epoch "
                f"{self.epoch}: a checkpoint was loaded in between, every worker must take part"
            )
        last = self._last.get(worker)
        if last is None or last.started_at < started_at:
            return True
        if last.started_at > started_at:
            raise ProtocolError(
                f"there are two workers {worker}: one that was started at {last.started_at} has "
                f"pushed, but one that was started at {started_at} still pushes; end the older "
                "process"
            )
        return sequence > last.sequence

    def check_has(self, worker: int, started_at: int, acknowledged: int) -> None:
        """Raise when this server is older than the worker's last acknowledgement."""
        last = self._last.get(worker)
        known = last.sequence if last is not None and last.started_at == started_at else 0
        if known < acknowledged:
            raise ProtocolError(
                "this server restarted with an older state: it has acknowledged push "
                f"{acknowledged} of worker {worker}, but push {known} is the last one that it has. "
                "Was its folder restored from an older copy, or did its machine stop before all "
                "was on the disk? "
                "Start all processes again, as fleetrun does with --max_restarts"
            )

    def applied(self, worker: int, started_at: int, sequence: int) -> None:
        """Record that the values contain the push."""
        self._last[worker] = _AppliedMark(started_at, sequence)

    def last(self, worker: int, started_at: int) -> int:
        """The last sequence number applied of a worker, 0 if none."""
        mark = self._last.get(worker)
        return 0 if mark is None or mark.started_at != started_at else mark.sequence

    def begin(self, epoch: int) -> None:
        """Start the epoch of a loaded checkpoint; pushes of older epochs are refused."""
        if epoch <= self.epoch:
            raise ProtocolError(
                f"a checkpoint was to begin epoch {epoch}, but this server is in epoch "
                f"{self.epoch}; epochs only grow"
            )
        self.epoch = epoch

    def restore(self, epoch: int, marks: Iterable[Mark]) -> None:
        """Restore the marks that were saved with the values."""
        self.epoch = epoch
        self._last = {
            worker: _AppliedMark(started_at, number) for worker, started_at, number in marks
        }

    def marks(self) -> list[Mark]:
        """The marks to save with the values."""
        return [(w, last.started_at, last.sequence) for w, last in sorted(self._last.items())]


def common_epoch(epochs: Mapping[int, int]) -> int:
    """The epoch that all servers share; raise when they loaded different checkpoints."""
    for server, epoch in epochs.items():
        if epoch != epochs[0]:
            raise PlanError(
                f"server 0 is in epoch {epochs[0]}, server {server} in epoch {epoch}: they have "
                "loaded different checkpoints; give all of them the same, "
                "fleet.init_server(dirname)"
            )
    return epochs[0]
