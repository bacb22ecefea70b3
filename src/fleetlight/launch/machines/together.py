# SPDX-License-Identifier: Apache-2.0
"""`Together`: one job on several machines, each with its own fleetrun."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from fleetlight.errors import FleetError, MembershipError
from fleetlight.launch.job.layout import Layout, Node
from fleetlight.launch.job.spec import JobSpec, Meeting
from fleetlight.launch.machines import store
from fleetlight.launch.machines.farewell import STRANGERS_S, see_off
from fleetlight.launch.machines.gathering import Meet, exchange, reach
from fleetlight.launch.machines.heartbeats import Heartbeats
from fleetlight.launch.machines.noticeboard import Noticeboard, agree
from fleetlight.launch.machines.outage import Outage, OutOfReachError, Silences
from fleetlight.launch.machines.own_node import described
from fleetlight.launch.machines.patience import Patience, absent
from fleetlight.launch.machines.peers import Conclusion, Next
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.processes.reason import Failure
from fleetlight.launch.processes.watch import LEAVE_S, SETTLE_S, UNKILLABLE_S, Elsewhere
from fleetlight.launch.screen import Screen

#: how often the others are asked how it goes
_ASK_S = 0.25
#: how often node 0 looks whether another machine would like to join
_ADMIT_S = 2.0


class Together:
    """The other machines, met through torch's store and rendezvous."""

    def __init__(
        self, job: JobSpec, meeting: Meeting, screen: Screen, interrupts: Interrupts
    ) -> None:
        self._job, self._meeting = job, meeting
        self._screen, self._interrupts = screen, interrupts
        store.quiet_torch()
        self._outage = Outage(self._master(), job.deadline_s, screen, interrupts)
        self._store, self._serves = reach(meeting, self._patience(), self._outage)
        # The rendezvous blocks on its connection, so it gets one of its own.
        own = store.connect(meeting)
        self._rendezvous = store.Rendezvous(own, meeting, job.host, job.deadline_s)
        now = time.monotonic()
        self._heartbeats = Heartbeats(self._store, job.host, now, job.deadline_s)
        self._noticeboard: Noticeboard | None = None
        self._silences = Silences(job.deadline_s, screen)
        self._last = Elsewhere.RUNNING
        self._next_ask = self._next_admission = 0.0
        self._is_gone = self._is_finished = False

    def _patience(self) -> Patience:
        return Patience(self._screen, self._interrupts, self._job.deadline_s)

    @property
    def _board(self) -> Noticeboard:
        assert self._noticeboard is not None, "gather comes first"
        return self._noticeboard

    def gather(self, node: Node) -> Layout:
        """Wait for the other machines and put all in order."""
        self._noticeboard, self._last = None, Elsewhere.RUNNING
        self._silences = Silences(self._job.deadline_s, self._screen)
        patience, meet = self._patience(), Meet(self._rendezvous)

        def are_here() -> bool:
            self._heartbeats.beat(time.monotonic())
            return meet.is_done()

        with self._naming_the_master():
            patience.wait(are_here, self._absent)
            own = described(node, self._job, self._meeting)
            name, number, count = meet.found
            shared = self._store.part(name)
            layout, launchers, warnings = exchange(
                own, (shared, number, count), self._heartbeats, self._meeting, patience
            )
        self._noticeboard = Noticeboard(shared, self._heartbeats, layout, launchers)
        for line in (*warnings, _order(layout)):
            self._screen.say(line)
        return layout

    def _absent(self) -> str:
        return absent(self._meeting, self._heartbeats.here(time.monotonic()))

    def share(self, job_id: str | None) -> str:
        """The job's id: given by node 0 once its logs are in place, awaited by the others."""
        with self._naming_the_master():
            if job_id is None:
                return self._board.await_job_id(self._patience())
            self._board.give_job_id(job_id)
            return job_id

    @contextlib.contextmanager
    def _naming_the_master(self) -> Iterator[None]:
        """Turn torch's errors about the connection into one that says whose it was."""
        try:
            yield
        except FleetError:
            raise
        except RuntimeError as error:
            self._interrupts.check()
            raise MembershipError(self._master_gone()) from error

    def _master(self) -> str:
        host, port = self._meeting.master
        return f"node 0, which serves {host}:{port},"

    def _master_gone(self) -> str:
        return f"{self._master()} went away"

    def elsewhere(self, workers_done: bool) -> Elsewhere:
        """Tell the others how it goes here, hear how it goes there."""
        now = time.monotonic()
        if now >= self._next_ask and not self._is_gone:
            try:
                with contextlib.suppress(OutOfReachError), self._outage.once():
                    self._last = self._ask(now, workers_done)
            except RuntimeError:
                self._is_gone, self._last = True, Elsewhere.STOP
            self._next_ask = time.monotonic() + _ASK_S
        return self._last

    def _ask(self, now: float, workers_done: bool) -> Elsewhere:
        self._heartbeats.beat(now)
        self._silences.tell(self._board.silent(now))
        self._admit(now)
        return self._board.ask(now, workers_done=workers_done)

    def _admit(self, now: float) -> None:
        """Node 0 sees a machine that waits and makes everybody meet again."""
        layout = self._board.layout
        has_room = len(layout.nodes) < self._meeting.max_nodes
        if has_room and layout.own == 0 and now >= self._next_admission:
            self._next_admission = now + _ADMIT_S
            if self._rendezvous.waiting():
                self._board.call_stop()

    @property
    def _longest_end_s(self) -> float:
        """How much later than here the processes of another machine may end."""
        return SETTLE_S + LEAVE_S + self._job.grace_s + UNKILLABLE_S

    def conclude(self, failure: Failure | None, *, restarts_left: int) -> Conclusion:
        """Tell the failure, wait until all machines have ended, and choose the first one."""
        agreed = Conclusion(
            next=Next.FINISH, failure=Failure(what=self._master_gone(), code=1, may_restart=False)
        )
        interrupts = len(self._interrupts.seen)

        def is_enough() -> bool:
            self._silences.tell(self._board.silent(time.monotonic()))
            return len(self._interrupts.seen) > interrupts

        if not self._is_gone:
            try:
                self._board.tell_end(failure)
                silent = self._board.wait_for_ends(self._longest_end_s, is_enough)
                agreed = agree(self._board, silent, self._meeting, restarts_left)
            except RuntimeError:
                self._is_gone = True
        self._is_finished = agreed.next is Next.FINISH
        return agreed

    def give_up(self, why: str) -> None:
        """This machine cannot go on; the others need not wait for its signs of life."""
        if self._noticeboard is not None and not self._is_finished:
            node = self._noticeboard.layout.node_name(self._noticeboard.layout.own)
            with contextlib.suppress(RuntimeError):
                told = Failure(what="fleetrun gave up", code=1, error=why, node=node)
                self._noticeboard.tell_end(told)

    def close(self) -> None:
        """Say goodbye; node 0 stays until the others have heard everything."""
        if self._is_gone:
            return
        with contextlib.suppress(RuntimeError):
            # An elastic job goes on without a machine that gave up.
            if self._is_finished and self._serves:
                self._rendezvous.close()
            self._heartbeats.say_goodbye()
            if self._serves:
                self._see_off()

    def _see_off(self) -> None:
        if self._noticeboard is None:
            see_off(self._heartbeats, (), STRANGERS_S, self._interrupts)
        else:
            # Others wait as long for a machine that does not end, and may have begun that later.
            longest_s = 2 * self._longest_end_s
            see_off(self._heartbeats, self._noticeboard.launchers, longest_s, self._interrupts)


def _order(layout: Layout) -> str:
    names = [layout.node_name(rank) for rank in range(len(layout.nodes))]
    return f"the job's machines: {', '.join(names)}; this is node {layout.own}"
