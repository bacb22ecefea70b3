# SPDX-License-Identifier: Apache-2.0
"""`ConnectedMachines`: one job on several machines, each with its own fleetrun."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fleetlight.errors import FleetError, LaunchError, MembershipError
from fleetlight.launch.job.layout import JobLayout, Node, check, ordered
from fleetlight.launch.job.spec import JobSpec, RendezvousSpec
from fleetlight.launch.machines import store
from fleetlight.launch.machines.exchanged.heartbeats import BEAT_S, Counters, Heartbeats
from fleetlight.launch.machines.exchanged.logs_exchange import LogsExchange
from fleetlight.launch.machines.exchanged.metrics_exchange import MetricsExchange
from fleetlight.launch.machines.other_machines import Conclusion, NextAction, conclusion
from fleetlight.launch.machines.own_node import with_shared_facts
from fleetlight.launch.machines.start_deadline import StartDeadline, describe_missing
from fleetlight.launch.machines.store_connection import Retry, StoreGoneError, StoreLostError
from fleetlight.launch.processes import ports
from fleetlight.launch.processes.failure import JobFailure, first_of_all
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.processes.logs import LogFolder
from fleetlight.launch.processes.watch import LEAVE_S, SETTLE_S, UNKILLABLE_S, RemoteState
from fleetlight.launch.screen import Screen
from fleetlight.roles.role import endpoint_text

_RETRY_S = 0.2
_LOOK_S = 0.05

_T = TypeVar("_T")


class OutOfReachError(StoreLostError):
    """The store is unreachable now; a later attempt may succeed."""


class Outage:
    """Retries operations while the store is unreachable, up to a deadline."""

    def __init__(self, name: str, longest_s: float, screen: Screen, interrupts: Interrupts) -> None:
        """`name` describes the machine that serves the store."""
        self._name, self._longest_s = name, longest_s
        self._screen, self._interrupts = screen, interrupts
        self._since: float | None = None
        self._is_reported = self._once = False

    @contextlib.contextmanager
    def single_attempt(self) -> Iterator[None]:
        """Within the context, raise OutOfReachError after one failed attempt."""
        self._once = True
        try:
            yield
        finally:
            self._once = False

    def outlast(self, attempt: Callable[[], _T]) -> _T:
        """Retry until success; raise the last error at the deadline or after another interrupt."""
        interrupts = len(self._interrupts.seen)
        while True:
            began = time.monotonic()
            try:
                value = attempt()
            except StoreGoneError:
                raise
            except RuntimeError as error:
                self._failed(began, error)
                if len(self._interrupts.seen) > interrupts:
                    raise
                time.sleep(_RETRY_S)
            else:
                self._worked()
                return value

    def _failed(self, began: float, error: RuntimeError) -> None:
        if self._since is None:
            self._since = began
        elif not self._is_reported:
            # the second attempt replaces a connection that only broke
            self._is_reported = True
            self._screen.say(f"{self._name} is unreachable; {_waiting(self._longest_s)}")
        if time.monotonic() - self._since >= self._longest_s:
            raise error
        if self._once:
            raise OutOfReachError(str(error)) from error

    def _worked(self) -> None:
        if self._is_reported and self._since is not None:
            away_s = time.monotonic() - self._since
            self._screen.say(f"{self._name} is back after {away_s:.0f} s")
        self._since, self._is_reported = None, False


class SilenceReport:
    """Reports machines that send no heartbeats, and those that are back."""

    def __init__(self, longest_s: float, screen: Screen) -> None:
        self._longest_s, self._screen = longest_s, screen
        self._seen: dict[str, float] = {}

    def tell(self, silent: Mapping[str, float]) -> None:
        """Print one line for each change; `silent` maps machines to seconds without heartbeat."""
        for name in silent.keys() - self._seen.keys():
            self._screen.say(f"{name} sends no heartbeats; {_waiting(self._longest_s)}")
        for name in self._seen.keys() - silent.keys():
            self._screen.say(f"{name} is back after {self._seen[name]:.0f} s")
        self._seen = dict(silent)


def _waiting(longest_s: float) -> str:
    return f"waiting up to {longest_s:g} s for it (--deadline_s)"


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


#: how long to serve launchers that never joined a start of the job, and cannot know its end
STRANGERS_S = 5.0


def reach(
    spec: RendezvousSpec, deadline: StartDeadline, retry: Retry | None = None
) -> tuple[store.Store, bool]:
    """Serve or connect to the launchers' store; return it, and True if it is served here."""
    if spec.is_master:
        served = store.serve(spec)
        if served is not None:
            return served, True
        _check_may_be_served_by_another(spec)
    deadline.wait(
        lambda: store.is_served(spec),
        lambda: f"not ready endpoints: ['{endpoint_text(spec.master)}']",
    )
    return store.connect(spec, deadline.left_s, retry), False


def _check_may_be_served_by_another(spec: RendezvousSpec) -> None:
    # of two launchers on one machine without --rank, the first serves; else the port is taken
    if spec.hosts or spec.rank == 0:
        host, port = spec.master
        flag = "--start_port" if spec.hosts else "--master"
        raise LaunchError(
            f"port {port} on {host}, the rendezvous of the machines, is taken{ports.owner(port)}; "
            f"end that process or choose another {flag} on all machines"
        )


class RendezvousThread:
    """Runs torch's rendezvous, which blocks, on a thread of its own."""

    def __init__(self, rendezvous: store.Rendezvous) -> None:
        self._found: tuple[str, int, int] | None = None
        self._error: Exception | None = None
        self._rendezvous = rendezvous
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._rendezvous.next_round()
        except Exception as error:  # is_done raises it
            self._error = error

    def is_done(self) -> bool:
        """True when the rendezvous is complete; raise its error if it failed."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def found(self) -> tuple[str, int, int]:
        """The round's name, this machine's number in 0..n-1, and n."""
        assert self._found is not None
        return self._found


def exchange(
    node: Node,
    joined: tuple[Counters, int, int],
    heartbeats: Heartbeats,
    spec: RendezvousSpec,
    deadline: StartDeadline,
) -> tuple[JobLayout, tuple[int, ...], list[str]]:
    """Exchange nodes; return the layout, the launchers' numbers in its order, and warnings."""
    shared, number, count = joined
    shared.set(f"node/{number}", json.dumps([node.to_dict(), heartbeats.number]))
    keys = [f"node/{other}" for other in range(count)]

    def all_there() -> bool:
        heartbeats.beat(time.monotonic())
        return shared.check(keys)

    deadline.wait(all_there, lambda: "a machine joined but did not send its description")
    descriptions = [json.loads(shared.get(key)) for key in keys]
    pairs = [(Node.from_dict(data), launcher) for data, launcher in descriptions]
    return _layout_of([n for n, _ in pairs], [launcher for _, launcher in pairs], number, spec)


def _layout_of(
    nodes: list[Node], launchers: list[int], number: int, spec: RendezvousSpec
) -> tuple[JobLayout, tuple[int, ...], list[str]]:
    warnings = check(nodes)
    in_order = ordered(nodes, spec)
    places = [next(n for n, one in enumerate(nodes) if one is node) for node in in_order]
    layout = JobLayout(nodes=in_order, own=places.index(number))
    return layout, tuple(launchers[place] for place in places), warnings


def serve_until_others_leave(
    heartbeats: Heartbeats, job_launchers: Collection[int], longest_s: float, interrupts: Interrupts
) -> None:
    """Serve the store until every other launcher has left or is silent.

    `job_launchers` took part in the last start of the job and have `longest_s` to leave.
    Another interrupt ends the wait.
    """
    began, interrupts_before = time.monotonic(), len(interrupts.seen)
    # a launcher may have joined since the last beat, if the job was short
    heartbeats.poll(began)
    while len(interrupts.seen) == interrupts_before:
        now = time.monotonic()
        heartbeats.beat(now)
        staying = heartbeats.remaining(now)
        waited_for = {
            number
            for number in staying
            if not heartbeats.is_late(
                number, began, now, longest_s if number in job_launchers else STRANGERS_S
            )
        }
        if not waited_for:
            return
        time.sleep(_LOOK_S)


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
