# SPDX-License-Identifier: Apache-2.0
"""Start and supervise this machine's processes of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence

from fleetlight.errors import FleetError
from fleetlight.launch import report
from fleetlight.launch.exit_codes import exit_code
from fleetlight.launch.job import environment
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.join_point import JoinPoint, remove
from fleetlight.launch.job.layout import JobLayout
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.machines.other_machines import NextAction, OtherMachines
from fleetlight.launch.machines.own_node import reserve_node
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.failure import JobFailure, failure_of
from fleetlight.launch.processes.followers.dashboard import DashboardProcess
from fleetlight.launch.processes.followers.event_export import EventExport
from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.interrupts import Interrupted, Interrupts
from fleetlight.launch.processes.logs import LogFolder, claim, relative
from fleetlight.launch.processes.ports import Reservation
from fleetlight.launch.processes.record import RecordFile
from fleetlight.launch.processes.supervise import supervise
from fleetlight.launch.processes.watch import Verdict, Watch
from fleetlight.launch.remedy import remedy
from fleetlight.launch.screen import Screen
from fleetlight.observe.console import Tone
from fleetlight.roles.role import endpoint_text

#: connects to the other machines; raises `Interrupted` when the user interrupts the wait
Connect = Callable[[Interrupts], OtherMachines]


def run(job: JobSpec, screen: Screen, connect: Connect) -> int:
    """Run this machine's part of the job; return the exit code of the first failure, else 0."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            return _Session(job, screen, connect, stack).run()
        except Interrupted as interrupt:
            seconds = time.monotonic() - began
            _end_line_of_interrupt(screen, interrupt.number)
            screen.say(str(report.interrupted(interrupt.number, seconds)))
            return exit_code(-interrupt.number)


def _end_line_of_interrupt(screen: Screen, number: int) -> None:
    """A terminal shows ^C where the user presses it."""
    if number == signal.SIGINT and screen.size is not None:
        screen.block("\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attempt:
    """The result of one start of the job on this machine."""

    watch: Watch
    layout: JobLayout
    failure: JobFailure | None
    #: True if a process of this machine called `fleet.init`
    has_joined: bool


class _Session:
    """One call of fleetrun: all starts of its job."""

    def __init__(
        self, job: JobSpec, screen: Screen, connect: Connect, stack: contextlib.ExitStack
    ) -> None:
        self._job, self._screen, self._stack = job, screen, stack
        self._outside = dict(os.environ)
        self._interrupts = stack.enter_context(Interrupts(asks_to_end=job.join is not None))
        self._error_dir = tempfile.mkdtemp(prefix="fleetrun-")
        stack.callback(shutil.rmtree, self._error_dir, ignore_errors=True)
        self._reaper = stack.enter_context(Reaper(self._error_dir))
        self._machines = connect(self._interrupts)
        stack.callback(self._machines.close)
        self._own_id = secrets.token_hex(8)
        self._folder: LogFolder | None = None
        self._record: RecordFile | None = None
        self._began = time.monotonic()

    def run(self) -> int:
        """Start the job, and restart it after failures up to `max_restarts` times."""
        restart = failures = 0
        while True:
            ended = self._start(restart, failures)
            restart = ended.layout.restart + 1
            failures = ended.layout.failures + ended.watch.restarted
            left = self._job.max_restarts - failures
            conclusion = self._machines.conclude(ended.failure, restarts_left=left)
            if conclusion.next is NextAction.FINISH:
                return self._finish(ended, conclusion.failure)
            failures += conclusion.next is NextAction.RESTART
            left = self._job.max_restarts - failures
            self._show_traceback(conclusion.failure)
            self._screen.say(report.restarting(conclusion, restart, left), Tone.WARNING)

    def _start(self, restart: int, failures: int) -> _Attempt:
        with contextlib.ExitStack() as held:
            node, reservations = reserve_node(self._job, held, restart=restart, failures=failures)
            layout = self._machines.gather(node)
            try:
                return self._run_gang(layout, reservations)
            except (FleetError, Interrupted) as error:
                self._machines.give_up(str(error))
                raise

    def _run_gang(self, layout: JobLayout, reservations: Sequence[Reservation]) -> _Attempt:
        folder, job_id = self._prepare_logs(layout)
        run = Run(
            job=self._job,
            job_id=job_id,
            layout=layout,
            log_dir=str(folder.path),
            error_dir=self._error_dir,
            restart=layout.restart,
        )
        gang = Gang(
            run,
            folder=folder,
            reaper=self._reaper,
            screen=self._screen,
            outside=self._outside,
            record=self._open_record(folder, job_id, layout).update,
        )
        self._announce(gang)
        for reservation in reservations:
            reservation.hand_over()
        self._machines.follow(folder)
        gang.start(self._interrupts.check)
        left = self._job.max_restarts - layout.failures
        watch = supervise(gang, self._machines.exchange_state, self._interrupts, left)
        return _Attempt(
            watch=watch,
            layout=layout,
            failure=self._failure(watch, gang, folder),
            has_joined=any(exit_.reported.has_joined for exit_ in gang.exits()),
        )

    def _prepare_logs(self, layout: JobLayout) -> tuple[LogFolder, str]:
        """Claim the log folder: node 0 first, since it moves old logs out of a shared folder."""
        job_id = self._machines.share(None) if layout.own else self._own_id
        if self._folder is None:
            self._folder = claim(self._job.log_dir, job_id)
            self._stack.callback(self._folder.close)
            verbose = self._screen.verbose
            for line in report.folder(self._folder, self._job.log_dir, verbose=verbose):
                self._screen.say(line)
            if self._job.dashboard is not None and not layout.own:
                self._open_page(self._folder, self._job.dashboard)
        if not self._folder.is_shared:
            self._folder.write_endpoints(job_id, layout)
        if self._job.worker_max is not None:
            point = JoinPoint(endpoint_text(layout.servers[0]), self._job.token)
            point.write(self._folder.path)
            self._stack.callback(remove, self._folder.path)
        if not layout.own:
            self._machines.share(job_id)
        return self._folder, job_id or ""

    def _open_page(self, folder: LogFolder, port: int) -> None:
        page = DashboardProcess(folder.path, port, self._outside, self._reaper)
        self._stack.callback(page.close)
        self._screen.say(f"page: {page.link}")

    def _open_record(self, folder: LogFolder, job_id: str, layout: JobLayout) -> RecordFile:
        """This launcher's record. The next run archives it after the lock is released."""
        if self._record is None:
            job = self._job
            self._record = RecordFile(folder.path, job_id, job.machine.host, job.name)
            if job.sinks.events is not None and not layout.own:
                export = EventExport(folder.path, job.sinks.events, self._outside, self._reaper)
                self._stack.callback(export.close)
            # closed before: the export ends once the record says that the job is over
            self._stack.callback(self._record.close)
        return self._record

    def _announce(self, gang: Gang) -> None:
        run = gang.run
        if self._screen.verbose:
            self._show_details(gang)
        self._screen.say(report.started(run, gang.members))
        if self._job.worker_max is not None and run.restart == 0:
            self._screen.say(report.joinable(run))

    def _show_details(self, gang: Gang) -> None:
        """The variables that fleetrun chooses, and those of the first processes."""
        if gang.run.restart == 0:
            for line in environment.remarks(self._job, self._outside):
                self._screen.say(line)
        for first in report.first_of_each_kind(gang.members):
            table = report.table(first, environment.identity(gang.run, first))
            self._screen.block(table)

    def _failure(self, watch: Watch, gang: Gang, folder: LogFolder) -> JobFailure | None:
        layout = gang.run.layout
        node = layout.node_name(layout.own) if len(layout.nodes) > 1 else ""
        if watch.verdict is Verdict.INTERRUPTED:
            after_s = time.monotonic() - self._began
            if watch.stop_failed:
                why = report.not_saved(self._process_failure(watch, gang, folder))
            else:
                why = report.stopped_early(self._job.checkpoint, relative(folder.path))
            return report.interrupted(watch.signal, after_s, node, why)
        if watch.stop is not None:
            return report.stopped(watch.stop)
        return self._process_failure(watch, gang, folder, node)

    def _process_failure(
        self, watch: Watch, gang: Gang, folder: LogFolder, node: str = ""
    ) -> JobFailure | None:
        failed = watch.failure
        if failed is None and self._job.join is not None:
            # the job continues without each newcomer, but this call has added none
            failed = watch.first_of_lost_workers
        if failed is None:
            return None
        return failure_of(
            failed,
            folder.file(failed.member),
            after_s=max(0.0, failed.at - gang.started_at),
            node=node,
        )

    def _finish(self, ended: _Attempt, failure: JobFailure | None) -> int:
        seconds = time.monotonic() - self._began
        self._show_traceback(failure)
        if failure is None and not ended.has_joined:
            line = report.not_joined(ended.layout, self._job.script)
            if line is not None:
                self._screen.say(*line)
        if ended.watch.verdict is Verdict.INTERRUPTED:
            _end_line_of_interrupt(self._screen, ended.watch.signal)
        text = report.end(ended.layout, ended.watch, failure, seconds)
        self._screen.say(text, report.tone_of_end(failure))
        if failure is not None and self._folder is not None:
            advice = remedy(failure, relative(self._folder.path), self._job.checkpoint)
            if advice:
                self._screen.say(advice, Tone.WARNING)
        code = failure.code if failure else 0
        if self._record is not None:
            self._record.conclude(code)
        return code

    def _show_traceback(self, failure: JobFailure | None) -> None:
        if failure is not None and failure.traceback:
            self._screen.block(f"{failure.traceback}\n")
