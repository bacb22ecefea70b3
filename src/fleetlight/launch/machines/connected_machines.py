# SPDX-License-Identifier: Apache-2.0
"""`ConnectedMachines`: one job on several machines, each with its own fleetrun."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from fleetlight.errors import FleetError, MembershipError
from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.spec import JobSpec, RendezvousSpec
from fleetlight.launch.machines import store
from fleetlight.launch.machines.exchanged.heartbeats import BEAT_S, Heartbeats
from fleetlight.launch.machines.exchanged.logs_exchange import LogsExchange
from fleetlight.launch.machines.exchanged.metrics_exchange import MetricsExchange
from fleetlight.launch.machines.exchanged.status_board import StatusBoard, agree
from fleetlight.launch.machines.other_machines import Conclusion, NextAction
from fleetlight.launch.machines.outage import Outage, OutOfReachError, SilenceReport
from fleetlight.launch.machines.own_node import with_shared_facts
from fleetlight.launch.machines.rendezvous import (
    STRANGERS_S,
    RendezvousThread,
    exchange,
    reach,
    serve_until_others_leave,
)
from fleetlight.launch.machines.start_deadline import StartDeadline, describe_missing
from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.processes.logs import LogFolder
from fleetlight.launch.processes.watch import LEAVE_S, SETTLE_S, UNKILLABLE_S, RemoteState
from fleetlight.launch.screen import Screen

#: the interval at which launchers exchange their states
_ASK_S = 0.25
#: the interval at which node 0 looks for machines that wait to join
_ADMIT_S = 2.0


class ConnectedMachines:
    """The other machines, connected by torch's store and rendezvous."""

    def __init__(
        self, job: JobSpec, spec: RendezvousSpec, screen: Screen, interrupts: Interrupts
    ) -> None:
        self._job, self._spec = job, spec
        self._screen, self._interrupts = screen, interrupts
        store.quiet_torch()
        self._outage = Outage(self._master(), job.deadline_s, screen, interrupts)
        self._store, self._serves = reach(spec, self._deadline(), self._outage)
        # the rendezvous blocks on its connection, so it has one of its own
        own = store.connect(spec)
        self._rendezvous = store.Rendezvous(own, spec, job.machine.host, job.deadline_s)
        now = time.monotonic()
        self._heartbeats = Heartbeats(self._store, job.machine.host, now, job.deadline_s)
        self._status_board: StatusBoard | None = None
        self._silences = SilenceReport(job.deadline_s, screen)
        self._last = RemoteState.RUNNING
        self._next_ask = self._next_admission = self._next_bring = 0.0
        self._is_gone = self._is_finished = False
        self._metrics: MetricsExchange | None = None
        self._logs: LogsExchange | None = None

    def _deadline(self) -> StartDeadline:
        return StartDeadline(self._screen, self._interrupts, self._job.deadline_s)

    @property
    def _board(self) -> StatusBoard:
        assert self._status_board is not None, "gather was not called"
        return self._status_board

    def gather(self, node: Node) -> JobLayout:
        """Wait for the other machines and agree on a layout."""
        self._status_board, self._last = None, RemoteState.RUNNING
        self._silences = SilenceReport(self._job.deadline_s, self._screen)
        deadline, meet = self._deadline(), RendezvousThread(self._rendezvous)

        def are_here() -> bool:
            self._heartbeats.beat(time.monotonic())
            return meet.is_done()

        with self._store_errors():
            deadline.wait(are_here, self._absent)
            own = with_shared_facts(node, self._job, self._spec)
            name, number, count = meet.found
            shared = self._store.prefixed(name)
            layout, launchers, warnings = exchange(
                own, (shared, number, count), self._heartbeats, self._spec, deadline
            )
        self._status_board = StatusBoard(shared, self._heartbeats, layout, launchers)
        for line in (*warnings, _order(layout)):
            self._screen.say(line)
        return layout

    def _absent(self) -> str:
        return describe_missing(self._spec, self._heartbeats.reachable_hosts(time.monotonic()))

    def share(self, job_id: str | None) -> str:
        """Publish the job's id on node 0; on the others (`job_id` None) wait for it."""
        with self._store_errors():
            if job_id is None:
                return self._board.await_job_id(self._deadline())
            self._board.publish_job_id(job_id)
            return job_id

    def follow(self, folder: LogFolder) -> None:
        """Bring metrics and logs of other machines to node 0, from now on."""
        layout, store = self._board.layout, self._board.store
        own, nodes = layout.own, len(layout.nodes)
        copies = None if self._metrics is None else self._metrics.copies
        self._metrics = MetricsExchange(store, own, nodes, folder.path, copies)
        if self._logs is None:
            number, host = self._heartbeats.number, self._job.machine.host
            # the launcher that has locked a shared folder sends its logs
            sends = not folder.is_shared
            self._logs = LogsExchange(self._store, number, host, folder.path, sends=sends)

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Turn torch's connection errors into one that names the master."""
        try:
            yield
        except FleetError:
            raise
        except RuntimeError as error:
            self._interrupts.check()
            raise MembershipError(self._master_gone()) from error

    def _master(self) -> str:
        host, port = self._spec.master
        return f"node 0, which serves {host}:{port},"

    def _master_gone(self) -> str:
        return f"{self._master()} was lost"

    def exchange_state(self, workers_done: bool) -> RemoteState:
        """Report this machine's state; return that of the other machines."""
        now = time.monotonic()
        if now >= self._next_ask and not self._is_gone:
            try:
                with contextlib.suppress(OutOfReachError), self._outage.single_attempt():
                    self._ask(now, workers_done)
            except RuntimeError:
                self._is_gone, self._last = True, RemoteState.STOP
            self._next_ask = time.monotonic() + _ASK_S
        return self._last

    def _ask(self, now: float, workers_done: bool) -> None:
        self._heartbeats.beat(now)
        self._silences.tell(self._board.silent(now))
        self._admit(now)
        self._last = self._board.ask(now, workers_done=workers_done)
        # last, since a slow link takes long for it
        if now >= self._next_bring:
            try:
                self._bring()
            finally:
                self._next_bring = time.monotonic() + BEAT_S

    def _admit(self, now: float) -> None:
        """On node 0: stop the job for another rendezvous if a machine waits to join."""
        layout = self._board.layout
        has_room = len(layout.nodes) < self._spec.max_nodes
        if has_room and layout.own == 0 and now >= self._next_admission:
            self._next_admission = now + _ADMIT_S
            if self._rendezvous.waiting():
                self._board.request_stop()

    @property
    def _longest_end_s(self) -> float:
        """How much later the processes of another machine may end."""
        return SETTLE_S + LEAVE_S + self._job.grace_s + UNKILLABLE_S

    def conclude(self, failure: JobFailure | None, *, restarts_left: int) -> Conclusion:
        """Report the failure, wait until all machines have ended, and agree on what is next."""
        agreed = Conclusion(
            next=NextAction.FINISH,
            failure=JobFailure(what=self._master_gone(), code=1, may_restart=False),
        )
        interrupts = len(self._interrupts.seen)

        def is_enough() -> bool:
            self._silences.tell(self._board.silent(time.monotonic()))
            return len(self._interrupts.seen) > interrupts

        if not self._is_gone:
            try:
                self._bring(is_last=True)
                self._board.report_end(failure)
                silent = self._board.wait_for_ends(self._longest_end_s, is_enough)
                self._bring(is_last=True)
                agreed = agree(self._board, silent, self._spec, restarts_left)
            except RuntimeError:
                self._is_gone = True
        self._is_finished = agreed.next is NextAction.FINISH
        return agreed

    def _bring(self, *, is_last: bool = False) -> None:
        if self._metrics is not None:
            self._metrics.bring()
        if self._logs is not None:
            launchers, receives = self._board.launchers, self._board.layout.own == 0
            # a copy that is too slow for the link decides nothing about the job at its end
            with contextlib.suppress(RuntimeError) if is_last else contextlib.nullcontext():
                self._logs.bring(launchers, receives=receives, is_last=is_last)

    def give_up(self, why: str) -> None:
        """Report that this machine cannot continue, so that the others do not wait for it."""
        if self._status_board is not None and not self._is_finished:
            node = self._status_board.layout.node_name(self._status_board.layout.own)
            with contextlib.suppress(RuntimeError):
                given_up = JobFailure(what="fleetrun gave up", code=1, error=why, node=node)
                self._status_board.report_end(given_up)

    def close(self) -> None:
        """Leave the store; node 0 serves it until the others have left."""
        if self._is_gone:
            return
        with contextlib.suppress(RuntimeError):
            # an elastic job continues without a machine that gave up
            if self._is_finished and self._serves:
                self._rendezvous.close()
            self._heartbeats.leave()
            if self._serves:
                self._serve_until_others_leave()

    def _serve_until_others_leave(self) -> None:
        if self._status_board is None:
            serve_until_others_leave(self._heartbeats, (), STRANGERS_S, self._interrupts)
        else:
            # other launchers may wait as long for a machine that does not end, and may start later
            longest_s = 2 * self._longest_end_s
            serve_until_others_leave(
                self._heartbeats, self._status_board.launchers, longest_s, self._interrupts
            )


def _order(layout: JobLayout) -> str:
    names = [layout.node_name(rank) for rank in range(len(layout.nodes))]
    return f"the job's machines: {', '.join(names)}; this is node {layout.own}"
