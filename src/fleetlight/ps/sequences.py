# SPDX-License-Identifier: Apache-2.0
"""`HighWater`: which pushes are applied already, so that one sent again is applied once. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from fleetlight.errors import PlanError, ProtocolError

#: worker, incarnation, the last sequence number applied
Mark = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class _Life:
    incarnation: int
    sequence: int


class HighWater:
    """The last sequence number of each worker; its pushes come in order, so one number is enough.

    A worker that was started again counts anew; its earlier lives are refused from then on.
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
        life = self._lives.get(worker)
        if life is None or life.incarnation < incarnation:
            return True
        if life.incarnation > incarnation:
            raise ProtocolError(
                f"worker {worker} has been started again (life {life.incarnation}), "
                f"but its life {incarnation} still pushes; end the older process"
            )
        return sequence > life.sequence

    def applied(self, worker: int, incarnation: int, sequence: int) -> None:
        """The push is part of the values from now on."""
        self._lives[worker] = _Life(incarnation, sequence)

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
        self._lives = {worker: _Life(life, sequence) for worker, life, sequence in marks}

    def marks(self) -> list[Mark]:
        """The numbers to keep with the values."""
        return [(w, life.incarnation, life.sequence) for w, life in sorted(self._lives.items())]


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
