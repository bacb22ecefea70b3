# SPDX-License-Identifier: Apache-2.0
"""`Watch`: a state machine that decides what to do with a gang. No processes, clock or sockets.

RUNNING -> SETTLING   a process failed: wait for the failures that belong to it
        -> LEAVING    all workers are done: servers may exit by themselves
        -> STOPPING   workers save and exit on request, then servers exit
        -> ENDING     a signal was sent; SIGKILL follows after the grace period
        -> OVER       no process runs
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Sequence

import msgspec

from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.failure import ProcessExit, first_failure, is_killed
from fleetlight.launch.status import Stop
from fleetlight.roles.role import Kind

#: how long other processes may take to fail too, before the first failure is chosen
SETTLE_S = 1.8
#: the same while a process is about to exit, perhaps with the error that is the cause
EXIT_S = 4.0
#: how long servers may take to exit by themselves after all workers
LEAVE_S = 5.0
#: how long to wait for the exits of servers after a worker was killed while it disconnected: they
#: show whether its goodbye arrived; after that the worker restarts
GOODBYE_S = 5.0
#: how long a process that only records the first SIGTERM may take; the second one ends it
FIRST_SIGTERM_S = 0.3
#: how long to wait for a killed process; then the launcher ends without it
UNKILLABLE_S = 5.0


class Phase(enum.Enum):
    """The state of a gang."""

    RUNNING = enum.auto()
    SETTLING = enum.auto()
    LEAVING = enum.auto()
    STOPPING = enum.auto()
    ENDING = enum.auto()
    OVER = enum.auto()


class RemoteState(enum.Enum):
    """What the launchers of the other machines report."""

    RUNNING = enum.auto()
    DONE = enum.auto()
    #: this machine must end its processes too
    STOP = enum.auto()


class Verdict(enum.Enum):
    """How a gang ended."""

    SUCCESS = enum.auto()
    FAILED = enum.auto()
    INTERRUPTED = enum.auto()
    #: another machine ended this start of the job
    STOPPED = enum.auto()
    #: stopped on request, with the job saved
    SAVED = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The inputs of a decision."""

    now: float
    exits: Sequence[ProcessExit] = ()
    #: True while a running process has reported that it is about to exit
    leaving: bool = False
    interrupts: Sequence[int] = ()
    #: True when all running processes save before they exit
    can_stop: bool = False
    remote: RemoteState = RemoteState.DONE


class Watch:
    """The state machine of one gang."""

    def __init__(
        self,
        members: Sequence[JobProcess],
        grace_s: float,
        max_restarts: int = 0,
        stop_s: float = 30.0,
    ) -> None:
        """`max_restarts` limits restarts of single processes; `stop_s` limits a stop that saves."""
        self._members = members
        self._max_restarts = max_restarts
        self._workers = sum(1 for member in members if member.kind is Kind.WORKER)
        self._grace_s, self._stop_s = grace_s, stop_s
        self._since = 0.0
        self._interrupts_taken = 0
        self._killed = False
        #: True while the processes may have taken SIGTERM as a request to save
        self._may_be_noted = False
        self.phase = Phase.RUNNING
        self.verdict = Verdict.SUCCESS
        #: the local failure that caused the others, or that made a stop fail
        self.failure: ProcessExit | None = None
        #: the interrupt that ended the job
        self.signal = 0
        #: the kinds that get the signal of the last `step`; empty: all processes get it
        self.asked: tuple[Kind, ...] = ()
        #: where the job can resume, once it has stopped
        self.stop: Stop | None = None
        #: True when a stop failed or took too long
        self.stop_failed = False
        #: True when servers had to be ended after the workers were done
        self.ended_servers = False
        #: when the exits were seen of processes that were killed while they disconnected
        self._goodbye_seen_at: dict[JobProcess, float] = {}
        #: how many processes were restarted alone
        self.restarted = 0
        #: the processes without which the others continue
        self.continued_without: list[ProcessExit] = []

    @property
    def restarts_left(self) -> int:
        """How many processes may still be restarted alone."""
        return self._max_restarts - self.restarted

    def confirmed_exits(self, exits: Sequence[ProcessExit], now: float) -> list[ProcessExit]:
        """The exits to act on now.

        Servers exit with 0 once they have the goodbyes of all workers. So the exit of a worker
        that was killed while it disconnected counts after theirs, or after a timeout.
        """
        exits = _with_saved_stop(exits)
        servers = sum(1 for member in self._members if member.kind is Kind.SERVER)
        ended = sum(1 for exit_ in exits if exit_.member.kind is Kind.SERVER)
        fails = any(exit_.has_failed and not exit_.killed_while_leaving for exit_ in exits)
        continues = self.phase in (Phase.RUNNING, Phase.STOPPING)
        if not servers or fails or not continues:
            return list(exits)
        if ended == servers:
            return [_as_departed(exit_) if exit_.killed_while_leaving else exit_ for exit_ in exits]
        return [
            exit_
            for exit_ in exits
            if not exit_.killed_while_leaving or self._is_overdue(exit_, now)
        ]

    def _is_overdue(self, exit_: ProcessExit, now: float) -> bool:
        return now - self._goodbye_seen_at.setdefault(exit_.member, now) >= GOODBYE_S

    def to_restart(self, seen: Observation) -> ProcessExit | None:
        """A process to restart while the others continue, if any."""
        is_new = len(seen.interrupts) > self._interrupts_taken
        continues = self.phase in (Phase.RUNNING, Phase.STOPPING)
        if not continues or is_new or not self.restarts_left:
            return None
        lost = next((exit_ for exit_ in seen.exits if exit_.may_restart_alone), None)
        if lost is not None:
            self.restarted += 1
            self._goodbye_seen_at.pop(lost.member, None)
        return lost

    def to_continue_without(self, seen: Observation) -> ProcessExit | None:
        """A process that has just exited and without which the others continue, if any."""
        if self.phase is not Phase.RUNNING:
            return None
        known = {exit_.member for exit_ in self.continued_without}
        ended = [exit_ for exit_ in seen.exits if exit_.status and exit_.member not in known]
        lost = next((exit_ for exit_ in ended if exit_.reported.expendable or exit_.is_done), None)
        self.continued_without += [] if lost is None else [lost]
        return lost

    @property
    def first_of_lost_workers(self) -> ProcessExit | None:
        """The first worker that was lost, if no worker ended well."""
        lost = [one for one in self.continued_without if not one.is_done]
        workers = [one for one in lost if one.member.kind is Kind.WORKER]
        return workers[0] if len(workers) == self._workers else None

    @property
    def is_over(self) -> bool:
        """True when no process of the gang runs."""
        return self.phase is Phase.OVER

    def step(self, seen: Observation) -> int | None:
        """The signal to send now, if any: to the kinds in `asked`, or to all processes."""
        self.asked = ()
        is_new = len(seen.interrupts) > self._interrupts_taken
        if is_new and self.phase in (Phase.RUNNING, Phase.SETTLING, Phase.LEAVING):
            return self._interrupt(seen)
        match self.phase:
            case Phase.RUNNING:
                return self._run(seen)
            case Phase.SETTLING:
                return self._settle(seen)
            case Phase.LEAVING:
                return self._leave(seen)
            case Phase.STOPPING:
                return self._stop(seen)
            case Phase.ENDING:
                return self._end(seen)
            case Phase.OVER:
                return None

    def _run(self, seen: Observation) -> int | None:
        if any(exit_.has_failed for exit_ in seen.exits):
            self._enter(Phase.SETTLING, seen)
            return self._settle(seen)
        if any(exit_.stop for exit_ in seen.exits):
            # workers notify each other of a stop that another launcher requested
            self._enter(Phase.STOPPING, seen)
            return self._stop(seen)
        if seen.remote is RemoteState.STOP:
            return self._begin_end(Verdict.STOPPED, seen)
        if self._workers_done(seen) and seen.remote is RemoteState.DONE:
            self._enter(Phase.LEAVING, seen)
            return self._leave(seen)
        return None

    def _settle(self, seen: Observation) -> int | None:
        first = first_failure(seen.exits)
        assert first is not None
        patience_s = EXIT_S if seen.leaving else SETTLE_S
        if first.is_root_cause or self._all_exited(seen) or seen.now - self._since >= patience_s:
            self.failure = first
            return self._begin_end(Verdict.FAILED, seen)
        return None

    def _leave(self, seen: Observation) -> int | None:
        if any(exit_.has_failed for exit_ in seen.exits):
            self._enter(Phase.SETTLING, seen)
            return self._settle(seen)
        if self._all_exited(seen):
            self._enter(Phase.OVER, seen)
        elif seen.now - self._since >= LEAVE_S:
            self.ended_servers = True
            return self._begin_end(self.verdict, seen)
        return None

    def _stop(self, seen: Observation) -> int | None:
        """Wait until the workers have saved and exited; servers exit after them."""
        if not self.signal and seen.interrupts:
            # the processes know of the stop already, from those of another machine
            self.signal, self._interrupts_taken = seen.interrupts[0], len(seen.interrupts)
        waited, again = seen.now - self._since, len(seen.interrupts) > self._interrupts_taken
        done = self._workers_done(seen) if self._workers else self._all_exited(seen)
        if again or waited >= self._stop_s or any(exit_.has_failed for exit_ in seen.exits):
            self.stop_failed, self._killed = True, True
            self.failure = first_failure(seen.exits)
            self._begin_end(Verdict.INTERRUPTED, seen)
            return None if self.is_over else signal.SIGKILL
        if done:
            self.stop = _first_stop(seen.exits)
            self.verdict = Verdict.SUCCESS if self.stop is None else Verdict.SAVED
            self._enter(Phase.LEAVING, seen)
            return self._leave(seen)
        return None

    def _end(self, seen: Observation) -> int | None:
        waited = seen.now - self._since
        again = len(seen.interrupts) > self._interrupts_taken
        if self._all_exited(seen) or waited >= self._grace_s + UNKILLABLE_S:
            self._enter(Phase.OVER, seen)
        elif not self._killed and (again or waited >= self._grace_s):
            self._killed = True
            return signal.SIGKILL
        elif self._may_be_noted and seen.can_stop and waited >= FIRST_SIGTERM_S:
            self._may_be_noted = False
            return signal.SIGTERM
        return None

    def _interrupt(self, seen: Observation) -> int | None:
        self.signal = seen.interrupts[self._interrupts_taken]
        if self.verdict is Verdict.SAVED:
            return self._begin_end(self.verdict, seen, self.signal)
        if self.phase is Phase.RUNNING and self.signal == signal.SIGTERM and seen.can_stop:
            self._interrupts_taken = len(seen.interrupts)
            self._enter(Phase.STOPPING, seen)
            self.asked = (Kind.WORKER,) if self._workers else (Kind.SERVER,)
            return signal.SIGTERM
        return self._begin_end(Verdict.INTERRUPTED, seen, self.signal)

    def _begin_end(
        self, verdict: Verdict, seen: Observation, number: int = signal.SIGTERM
    ) -> int | None:
        self.verdict = verdict
        self._interrupts_taken = len(seen.interrupts)
        if self._all_exited(seen):
            self._enter(Phase.OVER, seen)
            return None
        self._enter(Phase.ENDING, seen)
        self._may_be_noted = number == signal.SIGTERM
        return number

    def _enter(self, phase: Phase, seen: Observation) -> None:
        self.phase = phase
        self._since = seen.now

    def _workers_done(self, seen: Observation) -> bool:
        ended = sum(1 for exit_ in seen.exits if exit_.member.kind is Kind.WORKER)
        return ended == self._workers

    def _all_exited(self, seen: Observation) -> bool:
        return len(seen.exits) == len(self._members)


def _as_departed(exit_: ProcessExit) -> ProcessExit:
    """The exit of a worker whose goodbye arrived; all servers have exited."""
    reported = msgspec.structs.replace(exit_.reported, left_job=True, restartable=False)
    return dataclasses.replace(exit_, reported=reported)


def _with_saved_stop(exits: Sequence[ProcessExit]) -> Sequence[ProcessExit]:
    """The exits, where servers that failed after a saved stop count as stopped.

    A worker that is killed after its stop has saved, but its goodbye does not arrive at the
    servers, which then fail.
    """
    killed = (exit_.stop for exit_ in exits if exit_.stop is not None and is_killed(exit_.status))
    stop = next(killed, None)
    return [
        dataclasses.replace(exit_, stop=stop)
        if stop is not None and _failed_without_goodbye(exit_)
        else exit_
        for exit_ in exits
    ]


def _failed_without_goodbye(exit_: ProcessExit) -> bool:
    return exit_.member.kind is Kind.SERVER and exit_.has_failed and exit_.reported.caused_by_peer


def _first_stop(exits: Sequence[ProcessExit]) -> Stop | None:
    """The stop of worker 0, or of the next process; servers, which count no steps, come last."""
    order = sorted(
        exits, key=lambda exit_: (exit_.member.kind is not Kind.WORKER, exit_.member.index)
    )
    return next((exit_.stop for exit_ in order if exit_.stop is not None), None)
