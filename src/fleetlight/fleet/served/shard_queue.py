# SPDX-License-Identifier: Apache-2.0
"""`ShardQueueClient`: server 0 deals out the records of a loader, range by range.

A faster worker asks more often. The unfinished range of a worker that is lost or leaves goes to
other workers.
"""

from __future__ import annotations

from typing import Any

from fleetlight.data.order.blocks import Interval
from fleetlight.data.queue.client import Cut, RangePosition, RangeRequest
from fleetlight.data.queue.source import RangeSource
from fleetlight.errors import ConfigError
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.background import in_main_thread
from fleetlight.fleet.served.elastic.join_state import JoinState
from fleetlight.fleet.served.session import ServerSession
from fleetlight.ps import messages as m
from fleetlight.ps.worker.connections import CONTROL
from fleetlight.ps.worker.joining import RunningJob

#: the server that deals out records
_SERVER = 0


class ShardQueueClient:
    """The queue of one loader, identified by its number, which is equal on all workers."""

    def __init__(self, job: Job, session: ServerSession, loader: int) -> None:
        self._job, self._served_session, self._loader = job, session, loader

    def deal(self, request: RangeRequest) -> Interval | Cut | None:
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
        if request.waits:
            self._leave_if_asked()
        reply = self._ask(message)
        while isinstance(reply, m.Held):
            self._leave_if_asked()
            if reply.wants_state:
                self._offer(request)
            reply = self._ask(message)
        if not isinstance(reply, m.LeaseReply):
            return None
        self._session().client.count_active(reply.active)
        return Cut(reply.left) if reply.left else (reply.start, reply.stop)

    def _leave_if_asked(self) -> None:
        """Leave before the first batch of a range, if this worker is to leave."""
        if self._job.departure is not None and in_main_thread():
            self._job.departure.leave_if_asked()

    def _offer(self, request: RangeRequest) -> None:
        """Offer the state of this worker to those that join at the start of a turn."""
        session = self._session()
        source = self._job.loaders[self._loader].source
        assert isinstance(source, RangeSource)
        position = source.at_turn(request.turn, request.whole)
        state = JoinState.of(self._job, session, self._loader, position)
        encoded = None if state is None else state.to_bytes()
        RunningJob(session.client).offer(self._loader, request.turn, encoded)

    def reached(self, turn: int, position: RangePosition, *, gives_back: bool) -> None:
        if self._is_member():
            self._ask(m.LeaseProgress(self._loader, turn, position, gives_back))

    def remaining(self, turn: int) -> list[Interval] | None:
        reply = self._ask(m.RemainingRequest(self._loader, turn))
        assert isinstance(reply, m.Remaining), reply
        return reply.ranges

    def steps(self) -> tuple[int, int]:
        session = self._served_session
        if not session.is_open:
            return 0, 0
        return session.communicator.made, session.communicator.acknowledged

    def settle(self) -> None:
        if self._is_member():
            self._session().communicator.settle()

    def resume(self) -> None:
        if self._is_member():
            self._session().communicator.resume()

    def reopen(self) -> None:
        if self._is_member():
            self._session().communicator.reopen()

    def _is_member(self) -> bool:
        """False once this worker has left the job: the loop of a loader may end later."""
        return not (self._served_session.is_over or self._served_session.has_left)

    def _ask(self, message: m.Message) -> m.Message:
        return self._session().client.ask(CONTROL, {_SERVER: (message, ())})[_SERVER].message

    def _session(self) -> ServerSession:
        self._served_session.open(self._job)
        _check_mode(self._served_session)
        return self._served_session

    def __reduce__(self) -> Any:
        # a loader sent to a loading process takes no part in the job there
        return _no_shard_queue, ()


class NoShardQueue:
    """The shard queue of a loader in a parameter server, whose script must not read it."""

    def deal(self, request: RangeRequest) -> None:
        self._refuse()

    def reached(self, turn: int, position: RangePosition, *, gives_back: bool) -> None:
        """There is nothing to report."""

    def remaining(self, turn: int) -> None:
        self._refuse()

    def steps(self) -> tuple[int, int]:
        return 0, 0

    def settle(self) -> None:
        """There is nothing in flight."""

    def resume(self) -> None:
        """There is nothing in flight."""

    def reopen(self) -> None:
        """There is nothing in flight."""

    def _refuse(self) -> None:
        raise ConfigError(
            "a loader with deal='queue' was read in a parameter server, where nothing trains; read "
            "it where fleet.is_worker() is true"
        )


def _check_mode(session: ServerSession) -> None:
    plan = session.bound.plan
    is_elastic = not session.client.has_fixed_workers
    if (plan.steps_together and not is_elastic) or not plan.serves_dense:
        how = "in sync mode" if plan.steps_together else "with dense='allreduce'"
        raise ConfigError(
            f"fleet.shard: got deal='queue', but {how} all workers make each step together, so all "
            "need as many batches; leave deal out, or train with a_sync=True and dense='servers'"
        )


def _no_shard_queue() -> None:
    return None
