# SPDX-License-Identifier: Apache-2.0
"""`ShardQueueClient`: server 0 deals out the records of a loader, range by range.

Whoever trains faster asks more often. What a worker has in hand that is lost, or leaves, is dealt
out to others.
"""

from __future__ import annotations

from typing import Any

from fleetlight.data.order.blocks import Interval
from fleetlight.data.queue.client import RangePosition, RangeRequest
from fleetlight.errors import ConfigError
from fleetlight.fleet.job import Job
from fleetlight.fleet.served.session import ServerSession
from fleetlight.ps import messages as m
from fleetlight.ps.plan import SYNC
from fleetlight.ps.worker.connections import CONTROL

#: the server that deals out
_SERVER = 0


class ShardQueueClient:
    """For one loader, by its number: the same on all workers, who make the same calls."""

    def __init__(self, job: Job, session: ServerSession, loader: int) -> None:
        self._job, self._opened, self._loader = job, session, loader

    def deal(self, request: RangeRequest) -> Interval | None:
        """As in `QueueClient`."""
        message = m.LeaseRequest(
            self._loader,
            request.turn,
            request.epoch,
            request.number,
            request.reached,
            request.back,
            list(request.whole),
            request.unit,
            request.batches,
            request.waits,
        )
        told = self._told(message)
        return (told.start, told.stop) if isinstance(told, m.LeaseReply) else None

    def reached(self, turn: int, position: RangePosition, *, gives_back: bool) -> None:
        """As in `QueueClient`."""
        if self._is_here():
            self._told(m.LeaseProgress(self._loader, turn, position, gives_back))

    def remaining(self, turn: int) -> list[Interval] | None:
        """As in `QueueClient`."""
        told = self._told(m.RemainingRequest(self._loader, turn))
        assert isinstance(told, m.Remaining), told
        return told.ranges

    def steps(self) -> tuple[int, int]:
        """As in `QueueClient`."""
        session = self._opened
        if not session.is_open:
            return 0, 0
        return session.communicator.made, session.communicator.acknowledged

    def settle(self) -> None:
        """As in `QueueClient`."""
        if self._is_here():
            self._session().communicator.settle()

    def resume(self) -> None:
        """As in `QueueClient`."""
        if self._is_here():
            self._session().communicator.resume()

    def reopen(self) -> None:
        """As in `QueueClient`."""
        if self._is_here():
            self._session().communicator.reopen()

    def _is_here(self) -> bool:
        """False once this worker has left: a loop may end later than the job."""
        return not (self._opened.is_over or self._opened.has_left)

    def _told(self, message: m.Message) -> m.Message:
        return self._session().client.ask(CONTROL, {_SERVER: (message, ())})[_SERVER].message

    def _session(self) -> ServerSession:
        self._opened.open(self._job)
        _check_mode(self._opened)
        return self._opened

    def __reduce__(self) -> Any:
        # a loader sent to a loading process takes no part in the job there
        return _nobody, ()


class NoDealer:
    """The dealer of a loader in a parameter server, where no loop is to read it."""

    def deal(self, request: RangeRequest) -> None:
        """Refuse."""
        self._refuse()

    def reached(self, turn: int, position: RangePosition, *, gives_back: bool) -> None:
        """Nothing is done here."""

    def remaining(self, turn: int) -> None:
        """Refuse."""
        self._refuse()

    def steps(self) -> tuple[int, int]:
        """As in `QueueClient`."""
        return 0, 0

    def settle(self) -> None:
        """Nothing is on its way."""

    def resume(self) -> None:
        """Nothing is on its way."""

    def reopen(self) -> None:
        """Nothing is on its way."""

    def _refuse(self) -> None:
        raise ConfigError("a loader with deal='queue' was read in a server; servers do not train")


def _check_mode(session: ServerSession) -> None:
    plan = session.drawn.plan
    if plan.mode == SYNC or not plan.serves_dense:
        how = "in sync mode" if plan.mode == SYNC else "with dense='allreduce'"
        raise ConfigError(
            f"fleet.shard: got deal='queue', but {how} all workers make each step together, so all "
            "need as many batches; leave deal out, or train with a_sync=True and dense='servers'"
        )


def _nobody() -> None:
    return None
