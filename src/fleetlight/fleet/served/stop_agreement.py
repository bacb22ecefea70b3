# SPDX-License-Identifier: Apache-2.0
"""The workers of a job with servers agree to save or stop, or one of them leaves alone."""

from __future__ import annotations

import time

from fleetlight.errors import MembershipError, PeerError, StoppedError
from fleetlight.fleet.checkpoints.autosave import SigtermHandler
from fleetlight.fleet.checkpoints.stop_agreement import PolledAgreement
from fleetlight.fleet.exit.exit_status import report_saves_at_sigterm
from fleetlight.fleet.job import Job
from fleetlight.fleet.served.session import ServerSession
from fleetlight.observe.log import logger
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.wire.control_signals import ControlSignal

#: how long worker 0 waits for the last pushes of the others before its last save
_LAST_S = 10.0
_POLL_S = 0.1


class ServedAgreement:
    """Servers pass requests on, in their replies to steps and to heartbeats."""

    def __init__(self, job: Job, session: ServerSession, peers: ServedGroup) -> None:
        self._job, self._session, self._peers = job, session, peers
        self._polled = PolledAgreement(peers)

    @property
    def in_lockstep(self) -> bool:
        return self._is_sync or not self._session.bound.plan.serves_dense

    @property
    def _is_sync(self) -> bool:
        return self._session.bound.plan.steps_together

    def agree(self, request: ControlSignal) -> ControlSignal:
        if self._peers.alone:
            return request
        self._send(request)
        if self._is_sync:
            # it arrived with the reply to the last common step
            return self._peers.client.signals.from_steps
        if not self.in_lockstep:
            # each worker stops on its own, and worker 0 saves the values of the servers
            return request | ControlSignal(stop=self._peers.client.signals.received.stop)
        return self._polled.agree(request)

    def _send(self, request: ControlSignal) -> None:
        """Send this worker's request with its heartbeats; a stop goes at once."""
        client = self._peers.client
        is_urgent = request.stop and not client.signals.own.stop
        client.signals.own = request
        if is_urgent:
            client.heartbeat(self._job.step)

    def stops_with_peers(self, error: MembershipError, *, was_asked: bool) -> bool:
        if not self._session.is_open or self.in_lockstep:
            return False
        # a restarted server does not know why the others have left
        return (
            isinstance(error, StoppedError) or was_asked or self._peers.client.signals.received.stop
        )

    def prepare_stop(self, grace_s: float) -> None:
        if self.in_lockstep:
            return
        # workers that wait for this one in a barrier stop as well
        self._peers.client.signals.stops = True
        if self._peers.index == 0:
            self._await_the_others(grace_s)

    def note_stopped(self) -> None:
        self._peers.client.signals.stopped = True

    def _await_the_others(self, grace_s: float) -> None:
        """Wait until the other workers have left, when all their pushes have arrived."""
        client, step = self._peers.client, self._job.step
        end = time.monotonic() + min(_LAST_S, grace_s / 2)
        try:
            client.heartbeat(step)
            # it is None in a worker that was just restarted
            while client.active_workers != 1 and time.monotonic() < end:
                time.sleep(_POLL_S)
                client.heartbeat(step)
        except PeerError as error:
            logger.warning("saving without the last pushes of the other workers: %s", error)
            return
        if client.active_workers != 1:
            logger.warning(
                "saving while other workers still train (%s): their later pushes are not saved, "
                "and with deal='queue' their last records may be dealt out again",
                "server 0 does not report how many"
                if client.active_workers is None
                else client.active_workers - 1,
            )


class WorkerLeaves(SystemExit):
    """This worker leaves the job, and the others continue without it."""

    def __init__(self) -> None:
        super().__init__(0)


class WorkerDeparture(SigtermHandler):
    """Leaves at the first place between two batches after the signal.

    The end of the process returns the records that it has not trained on to the queue, waits for
    the pushes that are in flight, and says goodbye.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        #: True while gradients of a batch may wait for a step
        self._owes_step = False
        self._has_left = False
        report_saves_at_sigterm(job.role)

    def batch_begins(self) -> None:
        self._owes_step = True

    def step_made(self) -> None:
        merges = (managed.merge for managed in self._job.optimizers)
        self._owes_step = any(merge is not None and merge.is_between() for merge in merges)

    def leave_if_asked(self) -> None:
        """Leave if SIGTERM has arrived; called between two batches."""
        if self.seen and not self._owes_step:
            logger.warning(
                "SIGTERM: leaving at step %d; the other workers continue", self._job.step
            )
            self._has_left = True
            raise WorkerLeaves

    def check_stays(self) -> None:
        """End this process again if it calls the others in a `finally` of the script."""
        if self._has_left:
            raise WorkerLeaves
