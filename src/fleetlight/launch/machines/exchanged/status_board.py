# SPDX-License-Identifier: Apache-2.0
"""`StatusBoard`: the states that launchers exchange during one start of the job."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from fleetlight.errors import MembershipError
from fleetlight.launch.job.layout import JobLayout
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines.exchanged.heartbeats import Counters, Heartbeats
from fleetlight.launch.machines.other_machines import Conclusion, NextAction, conclusion
from fleetlight.launch.machines.start_deadline import StartDeadline
from fleetlight.launch.processes.failure import JobFailure, first_of_all
from fleetlight.launch.processes.watch import RemoteState

_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EndReport:
    """The report of a machine whose processes have ended, written as one value of the store."""

    #: True when all its workers exited with 0
    workers_done: bool
    #: the position of this failure in the order of reports
    place: int
    failure: JobFailure | None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> _EndReport:
        failure = data["failure"]
        return cls(**{**data, "failure": JobFailure(**failure) if failure else None})


class StatusBoard:
    """The states of the machines of one rendezvous, in their part of the store."""

    def __init__(
        self, store: Counters, heartbeats: Heartbeats, layout: JobLayout, launchers: Sequence[int]
    ) -> None:
        self.layout = layout
        self.launchers = launchers
        self.store, self._heartbeats = store, heartbeats
        self._nodes = range(len(layout.nodes))
        self._said_done = False
        self._ends: dict[int, _EndReport] = {}

    def publish_job_id(self, job_id: str) -> None:
        """Write the job's id; called on node 0 once its log folder is ready."""
        self.store.set("job", job_id)

    def await_job_id(self, deadline: StartDeadline) -> str:
        """Wait for the job's id from node 0."""

        def there() -> bool:
            self._heartbeats.beat(time.monotonic())
            if 0 in self.lost(time.monotonic()):
                raise MembershipError(f"{self.layout.node_name(0)} was lost")
            return self.store.check(["job"])

        deadline.wait(there, lambda: f"{self.layout.node_name(0)} is not ready")
        return self.store.get("job").decode()

    def ask(self, now: float, *, workers_done: bool) -> RemoteState:
        """Report whether this machine's workers are done; return the state of all machines."""
        if workers_done and not self._said_done:
            self.store.set(f"done/{self.layout.own}", "")
            self._said_done = True
        if self.all_done():
            return RemoteState.DONE
        stop = self.store.add("stop", 0) or self.lost(now)
        return RemoteState.STOP if stop else RemoteState.RUNNING

    def all_done(self) -> bool:
        """True when all workers of all machines have exited with 0."""
        return self.store.check([f"done/{node}" for node in self._nodes])

    def lost(self, now: float) -> list[int]:
        """The nodes whose launchers are lost."""
        return [node for node in self._nodes if self._heartbeats.is_lost(self.launchers[node], now)]

    def silent(self, now: float) -> dict[str, float]:
        """The names of the unreachable nodes, with the seconds since their last heartbeat."""
        return {
            self.layout.node_name(node): self._heartbeats.silence_s(number, now)
            for node, number in enumerate(self.launchers)
            if self._heartbeats.is_silent(number, now)
        }

    def request_stop(self) -> int:
        """End this start of the job on all machines; return the number of such requests."""
        return self.store.add("stop", 1)

    def report_end(self, failure: JobFailure | None) -> None:
        """Report that this machine's processes have ended, and with which failure."""
        place = 0 if failure is None else self.request_stop()
        end = _EndReport(workers_done=self._said_done, place=place, failure=failure)
        self.store.set(f"ended/{self.layout.own}", json.dumps(dataclasses.asdict(end)))

    def wait_for_ends(
        self, longest_s: float, is_enough: Callable[[], bool] = lambda: False
    ) -> list[JobFailure]:
        """Wait for the end reports of all machines; return failures for those without one.

        A launcher that has all reports can agree without the store. The wait also ends when
        `is_enough()`.
        """
        began = time.monotonic()
        left = set(self._nodes)
        while True:
            self._heartbeats.beat(now := time.monotonic())
            left = {node for node in left if not self._has_reported(node)}
            late = all(self._is_late(node, began, now, longest_s) for node in left)
            if late or is_enough():
                return [self._missing_report(node) for node in sorted(left)]
            time.sleep(_LOOK_S)

    def _is_late(self, node: int, began: float, now: float, longest_s: float) -> bool:
        return self._heartbeats.is_late(self.launchers[node], began, now, longest_s)

    def _has_reported(self, node: int) -> bool:
        key = f"ended/{node}"
        if node not in self._ends and self.store.check([key]):
            self._ends[node] = _EndReport.from_dict(json.loads(self.store.get(key)))
        return node in self._ends

    def _missing_report(self, node: int) -> JobFailure:
        is_silent = self._heartbeats.is_silent(self.launchers[node], time.monotonic())
        how = "was lost: no heartbeat" if is_silent else "did not end its processes in time"
        what = f"{self.layout.node_name(node)} {how}"
        return JobFailure(what=what, code=1, killed=True, may_restart=False)

    def failures(self) -> list[JobFailure]:
        """The reported failures in order of report."""
        reports = sorted(self._ends.values(), key=lambda end: end.place)
        return [end.failure for end in reports if end.failure is not None]

    def all_succeeded(self) -> bool:
        """True when all machines ended after all workers had exited with 0."""
        return len(self._ends) == len(self._nodes) and all(
            end.workers_done for end in self._ends.values()
        )


def agree(
    board: StatusBoard, silent: Sequence[JobFailure], spec: RendezvousSpec, restarts_left: int
) -> Conclusion:
    """The conclusion that each machine draws on its own, equal on all machines."""
    first = first_of_all([*silent, *board.failures()])
    left = len(board.layout.nodes) - len(silent)
    if first in silent and spec.is_elastic and left >= spec.min_nodes:
        return Conclusion(next=NextAction.REGROUP, failure=first)
    if first is None and not board.all_succeeded():
        return Conclusion(next=NextAction.REGROUP)
    return conclusion(first, restarts_left)
