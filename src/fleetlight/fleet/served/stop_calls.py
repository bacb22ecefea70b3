# SPDX-License-Identifier: Apache-2.0
"""`ServedCalls`: how workers of a job with servers agree that they save or stop now."""

from __future__ import annotations

import time

from fleetlight.errors import MembershipError, PeerError, StoppedError
from fleetlight.fleet.checkpoints.stop_calls import MeetingCalls
from fleetlight.fleet.job import Job
from fleetlight.fleet.served.session import ServerSession
from fleetlight.observe.log import logger
from fleetlight.ps.messages.base import ControlSignal
from fleetlight.ps.plan import SYNC
from fleetlight.ps.worker.served_group import ServedGroup

#: how long worker 0 waits for the last gradients of the others where these do not wait for it
_LAST_S = 10.0
_ASK_EVERY_S = 0.1


class ServedCalls:
    """The servers tell, with their answers to steps and to signs of life."""

    def __init__(self, job: Job, session: ServerSession, crew: ServedGroup) -> None:
        self._job, self._session, self._crew = job, session, crew
        self._meetings = MeetingCalls(crew)

    @property
    def in_lockstep(self) -> bool:
        """As in `StopCalls`."""
        return self._is_sync or not self._session.drawn.plan.serves_dense

    @property
    def _is_sync(self) -> bool:
        return self._session.drawn.plan.mode == SYNC

    def called(self, wish: ControlSignal) -> ControlSignal:
        """As in `StopCalls`."""
        if self._crew.alone:
            return wish
        self._tell(wish)
        if self._is_sync:
            # came with the answer to the last step that all made together
            return self._crew.client.called
        if not self.in_lockstep:
            # each stops for itself, and worker 0 saves what is on the servers
            return wish | ControlSignal(stop=self._crew.client.heard.stop)
        return self._meetings.called(wish)

    def _tell(self, wish: ControlSignal) -> None:
        """What this worker calls for goes with its signs of life; a stop has no time for that."""
        client = self._crew.client
        is_urgent = wish.stop and not client.wish.stop
        client.wish = wish
        if is_urgent:
            client.beat(self._job.step)

    def is_left_alone(self, error: MembershipError, *, was_asked: bool) -> bool:
        """As in `StopCalls`; where each stops for itself."""
        if not self._session.is_open or self.in_lockstep:
            return False
        # a server that was started again does not know why they have left
        return isinstance(error, StoppedError) or was_asked or self._crew.client.heard.stop

    def stopping(self, grace_s: float) -> None:
        """As in `StopCalls`."""
        if self.in_lockstep:
            return
        # whoever waits for this worker in a meeting stops, too
        self._crew.client.stops = True
        if self._crew.index == 0:
            self._await_the_others(grace_s)

    def stopped(self) -> None:
        """As in `StopCalls`."""
        self._crew.stopped = True

    def _await_the_others(self, grace_s: float) -> None:
        """What they have learnt last is on the servers once they have left."""
        client, step = self._crew.client, self._job.step
        end = time.monotonic() + min(_LAST_S, grace_s / 2)
        try:
            client.beat(step)
            # nothing is heard yet by a worker that was started again a moment ago
            while client.here != 1 and time.monotonic() < end:
                time.sleep(_ASK_EVERY_S)
                client.beat(step)
        except PeerError as error:
            logger.warning("the other workers were not waited for: %s", error)
            return
        if client.here != 1:
            logger.warning(
                "other workers still there: %s; what they learn from now on is not saved, and with "
                "deal='queue' records that they have trained on last may be dealt out again",
                "server 0 does not tell how many" if client.here is None else client.here - 1,
            )
