# SPDX-License-Identifier: Apache-2.0
"""`PresenceMonitor`: where threads of a server wait for workers, always with a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable

from fleetlight.errors import (
    RAISE_DEADLINE,
    DeadlineError,
    MembershipError,
    PeerError,
    PeerLostError,
    StoppedError,
)
from fleetlight.ps.resume import Decision, Remains, Report, decide
from fleetlight.ps.server.workers.roster import ABSENT, AWAY, HERE, LEFT, LOST, Roster
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal

#: how often a wait checks its condition without a notification
_LOOK_EVERY_S = 1.0
#: how long a server stays for workers that may have no reply to their goodbye; a launcher waits
#: longer for the server to exit
_LINGER_S = 2.0
#: how long a server that is asked to stop waits for workers that have not connected
_EARLY_S = 10.0


@dataclasses.dataclass
class _Activity:
    """The last request, step and operations of a worker."""

    last_seen: float
    step: int | None = None
    #: the requests in progress; several if the worker uses several connections
    doing: list[str] = dataclasses.field(default_factory=list)


class _Doing:
    """An operation of a worker in progress."""

    def __init__(self, activity: _Activity, operation: str, clock: Callable[[], float]) -> None:
        self._activity, self._operation, self._clock = activity, operation, clock

    def __enter__(self) -> None:
        self._activity.last_seen = self._clock()
        self._activity.doing.append(self._operation)

    def __exit__(self, *_: object) -> None:
        self._activity.doing.remove(self._operation)
        self._activity.last_seen = self._clock()


class PresenceMonitor:
    """Which workers are here and what each does. `changed` guards the state of all decisions.

    A wait that one kind of event ends has a condition of its own, so that no other event wakes it.
    """

    def __init__(
        self, roster: Roster, places: int, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        self.roster = roster
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._conditions = [self.changed]
        self.deadline_s = deadline_s
        self._clock = clock
        self._activities = [_Activity(clock()) for _ in range(places)]
        self._closed: str | None = None
        #: the control signals that workers have sent
        self._called = NO_SIGNAL
        self._stops = False
        #: when the server noticed the request to stop, without any worker
        self._stopped_at = 0.0

    def condition(self) -> threading.Condition:
        """Make a condition with the lock of `changed`; `notify_all` notifies it, too."""
        made = threading.Condition(self._lock)
        self._conditions.append(made)
        return made

    @property
    def call(self) -> ControlSignal:
        """The control signals of all workers and of this server."""
        return self._called | ControlSignal(stop=self._stops)

    def call_for(self, call: ControlSignal) -> None:
        """Add the control signal of a worker; called with `changed` held."""
        self._called |= call

    def call_stop(self) -> None:
        """Ask all workers to stop; signal handlers may call it at any time."""
        self._stops = True

    def during(self, worker: int, operation: str) -> contextlib.AbstractContextManager[None]:
        """Note that the worker is alive and waits for this operation."""
        return _Doing(self._activities[worker], operation, self._clock)

    def lose(self, worker: int, why: str) -> None:
        """The worker disconnects without goodbye; called with `changed` held."""
        self.roster.lose(worker, why, self._clock())
        self.notify_all()

    def leave(self, worker: int, error: str) -> None:
        """The worker says goodbye; called with `changed` held."""
        self.roster.leave(worker, self._clock(), error)
        self.notify_all()

    def expect(self, away_s: float, *, stays: bool = False) -> None:
        """Expect workers of an earlier incarnation within that time; with `changed` held.

        `stays`: also the workers that have left, since all processes were restarted.
        """
        self.roster.expect(self._clock(), away_s, away_s if stays else 0.0)

    def at_step(self, worker: int, step: int) -> None:
        """Record the step that the worker reports."""
        self._activities[worker].step = step

    def check(self) -> None:
        """Raise the error that keeps this server from serving, if any."""
        self.roster.check()
        if self._closed is not None:
            raise PeerLostError(self._closed)

    def close(self, why: str) -> None:
        """Fail all present and later waits with this reason; the first reason stays."""
        with self.changed:
            self._closed = self._closed or why
            self.notify_all()

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
        until: threading.Condition | None = None,
    ) -> None:
        """Wait until `ready`; called with `changed` held. The error names the missing workers.

        `otherwise` names the cause of the wait if no worker is missing. `until` is the condition
        that makes it ready, by default `changed`.
        """
        limit = self.deadline_s if deadline_s is None else deadline_s
        end = self._clock() + limit
        while not ready():
            self.check()
            self._check_here(operation, missing())
            left = end - self._clock()
            # a worker may send NaN as the deadline
            if not left > 0:
                raise DeadlineError(self._late(operation, limit, missing(), otherwise))
            # some failures notify no condition
            (until or self.changed).wait(min(left, _LOOK_EVERY_S))

    def until_all_left(self, look: Callable[[], None]) -> None:
        """Wait until every worker has left; raise a failure once the other workers know it.

        `look` finds workers that are away or overdue; called with no lock held.
        """
        began, failed_at = self._clock(), math.inf
        while True:
            look()
            with self.changed:
                if self.roster.failed:
                    failed_at = min(failed_at, self._clock())
                if self._is_over(began, failed_at):
                    self.roster.check()
                    return
                if not self.overdue():
                    self.changed.wait(min(_LOOK_EVERY_S, self.deadline_s))

    def overdue(self) -> bool:
        """True if a worker has been away for too long; called with `changed` held."""
        return bool(self.roster.overdue(self._clock()))

    def give_up(self) -> list[tuple[int, str]]:
        """Give up workers that are overdue; called with `changed` held."""
        lost = self.roster.give_up(self._clock())
        self.notify_all()
        return lost

    def notify_all(self) -> None:
        """Wake every wait, since it may now be in vain; called with `changed` held."""
        for condition in self._conditions:
            condition.notify_all()

    def _is_over(self, began: float, failed_at: float) -> bool:
        if self.closed:
            return True
        if not self.roster.in_state(ABSENT, HERE, AWAY):
            # the reply to a goodbye may be lost, and the worker repeats the goodbye
            return self.roster.failed or self._since(self.roster.unconfirmed_since()) > _LINGER_S
        self._check_connected(self.roster.in_state(ABSENT), began)
        # the next request of each other worker reports the failure, and the worker leaves
        is_known = not self.roster.in_state(HERE) or self._since(failed_at) > self.deadline_s
        return self.roster.failed and is_known

    def _check_connected(self, missing: list[int], began: float) -> None:
        """Raise if workers have not connected for too long, or will not."""
        if missing and self._stops and not self.roster.in_state(HERE, AWAY):
            self._stopped_at = self._stopped_at or self._clock()
            if self._since(self._stopped_at) > _EARLY_S:
                who = ", ".join(self._described(worker) for worker in missing)
                raise StoppedError(
                    f"the job was asked to stop, and the server has waited {_EARLY_S:g} s for {who}"
                )
        if missing and self._since(began) > self.deadline_s:
            raise DeadlineError(self._late("the server", self.deadline_s, missing))

    def _since(self, then: float) -> float:
        return self._clock() - then

    def place_for(self, started_at: int) -> int | None:
        """A free place for a worker that will join; called with `changed` held."""
        return self.roster.place_for(started_at, self._clock())

    def now(self) -> float:
        """The time by the clock of this server."""
        return self._clock()

    def lose_silent(self) -> None:
        """Lose silent workers: a machine that loses power closes no connection.

        Called with `changed` held.
        """
        now = self._clock()
        for worker in self.roster.in_state(HERE):
            silent = now - self._activities[worker].last_seen
            if silent > self.deadline_s and not self._activities[worker].doing:
                self.lose(worker, f"it has been silent for {silent:.0f} s")

    def _check_here(self, operation: str, missing: list[int]) -> None:
        if self.roster.tolerates_loss:
            # the server completes the wait once it gives up the lost worker
            return
        gone = [worker for worker in missing if worker in self.roster.in_state(LEFT, LOST)]
        if gone:
            raise MembershipError(
                f"{operation} would wait for worker {gone[0]}, which has left; every worker must "
                "make the same calls in the same order"
            )

    def _late(self, operation: str, limit: float, missing: list[int], otherwise: str = "") -> str:
        who = ", ".join(self._described(worker) for worker in missing) or otherwise
        return f"{operation} waited {limit:g} s for {who}; {RAISE_DEADLINE}"

    def _described(self, worker: int) -> str:
        activity = self._activities[worker]
        if worker in self.roster.in_state(ABSENT) and not self.roster.started_at(worker):
            return f"worker {worker} (it never connected)"
        if worker in self.roster.in_state(ABSENT, AWAY):
            return f"worker {worker} (it has disconnected and not returned)"
        if activity.doing:
            return f"worker {worker} (it is in {activity.doing[-1]})"
        silent = self._clock() - activity.last_seen
        place = "" if activity.step is None else f", last at step {activity.step}"
        return f"worker {worker} (silent for {silent:.0f} s{place})"


class ResumeReports:
    """The reports of all workers from which a restarted job decides how it resumes."""

    def __init__(self, presence: PresenceMonitor, worker_num: int) -> None:
        self._presence = presence
        self._changed = presence.changed
        self._reports: list[Report | None] = [None] * worker_num
        #: the contents of this server's folder; None unless the whole job resumes
        self.remains: Remains | None = None

    def report(self, worker: int, report: Report) -> Decision:
        """Add the report of a worker; return once all workers have reported."""
        with self._changed:
            self._reports[worker] = report
            self._changed.notify_all()
            return self._decided()

    def decided(self) -> Decision:
        """The decision of all processes; waits until all workers have reported."""
        with self._changed:
            return self._decided()

    def _decided(self) -> Decision:
        self._presence.wait("resuming", lambda: not self._missing(), self._missing)
        return decide([report for report in self._reports if report is not None])

    def _missing(self) -> list[int]:
        return [worker for worker, report in enumerate(self._reports) if report is None]


def copied_for_thread(error: Exception) -> Exception:
    """Copy an error for another thread to raise, without the frames of the first thread."""
    return type(error)(*error.args) if isinstance(error, PeerError) else error
