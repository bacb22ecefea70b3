# SPDX-License-Identifier: Apache-2.0
"""`PresenceMonitor`: where threads of a server wait for workers, always with a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator

from fleetlight.errors import DeadlineError, MembershipError, PeerError, PeerLostError
from fleetlight.ps.messages.base import NO_SIGNAL, ControlSignal
from fleetlight.ps.resume import Decision, Remains, Report, decide
from fleetlight.ps.server.workers.roster import ABSENT, AWAY, HERE, LEFT, LOST, Roster

LONGER = "if they need longer, raise deadline_s of the strategy given to fleet.init"
#: how often a wait looks around without being called
_LOOK_EVERY_S = 1.0
#: how long a server stays for workers that may not know that all have heard their goodbye; a
#: launcher waits longer for its end
_LINGER_S = 2.0


@dataclasses.dataclass
class _Trace:
    """What was last known of a worker."""

    heard: float
    step: int | None = None
    #: what it does here; several when it uses several connections
    doing: list[str] = dataclasses.field(default_factory=list)


class PresenceMonitor:
    """Which workers are here and what each does. `news` guards the state of all decisions."""

    def __init__(
        self, roster: Roster, worker_num: int, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        self.roster = roster
        self.news = threading.Condition()
        self.deadline_s = deadline_s
        self._clock = clock
        self._traces = [_Trace(clock()) for _ in range(worker_num)]
        self._closed: str | None = None
        #: what workers have called for
        self._called = NO_SIGNAL
        self._stops = False

    @property
    def call(self) -> ControlSignal:
        """What workers or this server have called for."""
        return self._called | ControlSignal(stop=self._stops)

    def call_for(self, call: ControlSignal) -> None:
        """A worker calls for it; called with `news` held."""
        self._called |= call

    def call_stop(self) -> None:
        """Ask all workers to stop; signal handlers may call it at any time."""
        self._stops = True

    @contextlib.contextmanager
    def during(self, worker: int, operation: str) -> Iterator[None]:
        """Note that the worker is alive, and busy with this operation."""
        trace = self._traces[worker]
        trace.heard = self._clock()
        trace.doing.append(operation)
        try:
            yield
        finally:
            trace.doing.remove(operation)
            trace.heard = self._clock()

    def lose(self, worker: int, why: str) -> None:
        """The worker is gone, without goodbye; called with `news` held."""
        self.roster.lose(worker, why, self._clock())
        self.news.notify_all()

    def leave(self, worker: int, error: str) -> None:
        """The worker says goodbye; called with `news` held."""
        self.roster.leave(worker, self._clock(), error)
        self.news.notify_all()

    def expect(self, away_s: float, *, stays: bool = False) -> None:
        """Expect workers of an earlier incarnation within that time; with `news` held.

        `stays`: also those that have left, since all processes were started again.
        """
        self.roster.expect(self._clock(), away_s, away_s if stays else 0.0)

    def at_step(self, worker: int, step: int) -> None:
        """The worker has said how far it is."""
        self._traces[worker].step = step

    def check(self) -> None:
        """Raise what keeps this server from serving, if anything does."""
        self.roster.check()
        if self._closed is not None:
            raise PeerLostError(self._closed)

    def close(self, why: str) -> None:
        """Fail all present and later waits with this reason; the first reason stays."""
        with self.news:
            self._closed = self._closed or why
            self.news.notify_all()

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed is not None

    def wait(
        self,
        operation: str,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        deadline_s: float | None = None,
        otherwise: str = "the server itself",
    ) -> None:
        """Until `ready`; called with `news` held. The error names who is missing and how it is.

        `otherwise` names what the wait is for where no worker is missing.
        """
        limit = self.deadline_s if deadline_s is None else deadline_s
        end = self._clock() + limit
        while not ready():
            self.check()
            self._check_here(operation, missing())
            left = end - self._clock()
            # what a worker says may be no number
            if not left > 0:
                raise DeadlineError(self._late(operation, limit, missing(), otherwise))
            # not all that makes a wait hopeless is announced
            self.news.wait(min(left, _LOOK_EVERY_S))

    def until_all_left(self, look: Callable[[], None]) -> None:
        """Until every worker has left; raises when one has failed, once the others know.

        `look` looks for those that are away, or have been for too long; with nothing held.
        """
        began, failed_at = self._clock(), math.inf
        while True:
            look()
            with self.news:
                if self.roster.failed:
                    failed_at = min(failed_at, self._clock())
                if self._is_over(began, failed_at):
                    self.roster.check()
                    return
                if not self.overdue():
                    self.news.wait(min(_LOOK_EVERY_S, self.deadline_s))

    def overdue(self) -> bool:
        """Whether a worker has been away for too long; called with `news` held."""
        return bool(self.roster.overdue(self._clock()))

    def give_up(self) -> list[tuple[int, str]]:
        """Give up workers that are overdue; called with `news` held."""
        lost = self.roster.give_up(self._clock())
        self.news.notify_all()
        return lost

    def _is_over(self, began: float, failed_at: float) -> bool:
        if self.closed:
            return True
        if not self.roster.those(ABSENT, HERE, AWAY):
            # a reply to a goodbye may be lost, and the worker asks again
            return self.roster.failed or self._since(self.roster.unconfirmed_since()) > _LINGER_S
        missing = self.roster.those(ABSENT)
        if missing and self._since(began) > self.deadline_s:
            raise DeadlineError(self._late("the server", self.deadline_s, missing))
        # the others learn of a failure when they call next, and say goodbye
        is_known = not self.roster.those(HERE) or self._since(failed_at) > self.deadline_s
        return self.roster.failed and is_known

    def _since(self, then: float) -> float:
        return self._clock() - then

    def lose_silent(self) -> None:
        """A machine that has lost its power closes no connection; its silence tells.

        Called with `news` held.
        """
        now = self._clock()
        for worker in self.roster.those(HERE):
            silent = now - self._traces[worker].heard
            if silent > self.deadline_s and not self._traces[worker].doing:
                self.lose(worker, f"it has been silent for {silent:.0f} s")

    def _check_here(self, operation: str, missing: list[int]) -> None:
        if self.roster.tolerates_loss:
            # who waits for one that is lost will be told that it need not
            return
        gone = [worker for worker in missing if worker in self.roster.those(LEFT, LOST)]
        if gone:
            raise MembershipError(
                f"{operation} would wait for worker {gone[0]}, which has left; every worker must "
                "make the same calls in the same order"
            )

    def _late(self, operation: str, limit: float, missing: list[int], otherwise: str = "") -> str:
        who = ", ".join(self._told(worker) for worker in missing) or otherwise
        return f"{operation} waited {limit:g} s for {who}; {LONGER}"

    def _told(self, worker: int) -> str:
        trace = self._traces[worker]
        if worker in self.roster.those(ABSENT) and not self.roster.incarnation(worker):
            return f"worker {worker} (it never connected)"
        if worker in self.roster.those(ABSENT, AWAY):
            return f"worker {worker} (it has disconnected and not returned)"
        if trace.doing:
            return f"worker {worker} (it is in {trace.doing[-1]})"
        silent = self._clock() - trace.heard
        place = "" if trace.step is None else f", last at step {trace.step}"
        return f"worker {worker} (silent for {silent:.0f} s{place})"


class ResumeReports:
    """Reports of all workers of a job that resumes as a whole, from which all processes decide."""

    def __init__(self, presence: PresenceMonitor, worker_num: int) -> None:
        self._presence = presence
        self._news = presence.news
        self._reports: list[Report | None] = [None] * worker_num
        #: what is in this server's folder; None where no whole job resumes
        self.remains: Remains | None = None

    def report(self, worker: int, report: Report) -> Decision:
        """A worker reports; the answer comes once all have."""
        with self._news:
            self._reports[worker] = report
            self._news.notify_all()
            return self._decided()

    def decided(self) -> Decision:
        """What all processes do, once all workers have reported."""
        with self._news:
            return self._decided()

    def _decided(self) -> Decision:
        self._presence.wait("resuming", lambda: not self._missing(), self._missing)
        return decide([one for one in self._reports if one is not None])

    def _missing(self) -> list[int]:
        return [worker for worker, report in enumerate(self._reports) if report is None]


def again(error: Exception) -> Exception:
    """An error for one more thread to raise: a raised one carries the first thread's frames."""
    return type(error)(*error.args) if isinstance(error, PeerError) else error
