# SPDX-License-Identifier: Apache-2.0
"""All processes of one machine during one start of the job."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from fleetlight.launch.job import environment
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.job.preload import modules_to_preload
from fleetlight.launch.process_identity import start_of
from fleetlight.launch.processes.child import Child, Reaper
from fleetlight.launch.processes.failure import ProcessExit, continuing_without, restarting_process
from fleetlight.launch.processes.logs import FileFollower, LogFolder
from fleetlight.launch.processes.output.held import HeldOutput
from fleetlight.launch.processes.output.terminal import PtyFollower
from fleetlight.launch.processes.preloading import template
from fleetlight.launch.processes.preloading.template import Start
from fleetlight.launch.processes.record import ProcessEntry
from fleetlight.launch.screen import Prefixed, Screen
from fleetlight.launch.status import ProcessStatus, clear_saves_at_sigterm, read
from fleetlight.observe.console import Tone
from fleetlight.roles.role import Kind


class _OutputFollower(Protocol):
    def pump(self) -> None: ...

    def close(self) -> None: ...


class Gang:
    """The processes, which start and end together."""

    def __init__(
        self,
        run: Run,
        *,
        folder: LogFolder,
        reaper: Reaper,
        screen: Screen,
        outside: Mapping[str, str],
        record: Callable[[Sequence[ProcessEntry]], None] = lambda entries: None,
    ) -> None:
        """`record` gets the processes after each change."""
        self.run = run
        self._record = record
        self.started_at = time.monotonic()
        self.members = run.layout.members(run.job.machine.devices)
        self._folder, self._reaper, self._screen, self._outside = folder, reaper, screen, outside
        self._children: dict[JobProcess, Child] = {}
        self._exits: dict[JobProcess, ProcessExit] = {}
        #: start times, so that `record` is not fooled by a reused PID
        self._starts: dict[Child, int | None] = {}
        #: how often each process was restarted alone
        self._incarnations: dict[JobProcess, int] = {}
        self._followers: list[_OutputFollower] = []
        #: the terminal of the first worker, if it has one
        self._terminal: PtyFollower | None = None
        self._prefixed: list[Prefixed] = []
        #: what each shown process has printed, without a traceback whose cause is not known yet
        self._held: dict[JobProcess, HeldOutput] = {}

    def start(self, check: Callable[[], None] = lambda: None) -> None:
        """Start all processes, or none if one cannot start; `check` may raise to end a wait."""
        try:
            with contextlib.ExitStack() as held:
                outputs = {m: held.enter_context(self._output(m)) for m in self.members}
                self._children.update(self._fork(outputs, check))
                for member, output in outputs.items():
                    if member not in self._children:
                        self._children[member] = self._spawn(member, output)
        except BaseException:
            self.close()
            raise
        self._record(self._entries())

    @contextlib.contextmanager
    def _output(self, member: JobProcess, incarnation: int = 0) -> Iterator[int]:
        """Follow the output of a process; the descriptor that the process starts with."""
        log = self._folder.open(member, self.run.restart + incarnation)
        if self._gets_terminal(member):
            held = self._hold(member, self._screen.show)
            terminal = PtyFollower(log, held, lambda: self._screen.size)
            self._replace_terminal(terminal)
            try:
                yield terminal.slave
            finally:
                terminal.started()
            return
        try:
            if not incarnation:
                # the follower of an earlier incarnation still reads the file
                self._follow(member)
            yield log
        finally:
            os.close(log)

    def _replace_terminal(self, terminal: PtyFollower) -> None:
        """Show the new incarnation's terminal in place of the previous one's."""
        if self._terminal is not None:
            self._terminal.pump()
            self._terminal.close()
            self._followers.remove(self._terminal)
        self._terminal = terminal
        self._followers.append(terminal)

    def _gets_terminal(self, member: JobProcess) -> bool:
        return _is_first(member) and self._screen.size is not None and not self.run.job.tee

    def _follow(self, member: JobProcess) -> None:
        if self.run.job.tee:
            prefixed = Prefixed(member.name, self._screen.show)
            self._prefixed.append(prefixed)
            held = self._hold(member, prefixed)
        elif _is_first(member):
            held = self._hold(member, self._screen.show)
        else:
            return
        self._followers.append(FileFollower(self._folder.file(member), held))

    def _hold(self, member: JobProcess, show: Callable[[bytes], None]) -> HeldOutput:
        if member not in self._held:
            self._held[member] = HeldOutput(show, lambda: self._is_failing(member))
        return self._held[member]

    def _is_failing(self, member: JobProcess) -> bool:
        """True once this process fails, or another one without which the job fails."""
        has_failed = any(exit_.has_failed for exit_ in self._exits.values())
        return has_failed or self._status(member).error is not None

    def _fork(
        self, outputs: Mapping[JobProcess, int], check: Callable[[], None]
    ) -> dict[JobProcess, Child]:
        """Fork all processes from one that has loaded their modules, or none."""
        starts = [Start(self._variables(member), output) for member, output in outputs.items()]
        modules = modules_to_preload(self.run, [start.environment for start in starts])
        if not modules:
            return {}
        children = template.fork(self.run.job.command, modules, starts, self._reaper, check)
        return dict(zip(outputs, children, strict=False))

    def _spawn(self, member: JobProcess, output: int) -> Child:
        command = (sys.executable, *self.run.job.command)
        return Child(command, self._variables(member), output, self._reaper)

    def _variables(self, member: JobProcess) -> dict[str, str]:
        return environment.member_environment(self.run, member, self._outside)

    def pump(self) -> None:
        """Show what the processes have written since the last call."""
        for follower in self._followers:
            follower.pump()
        for held in self._held.values():
            held.pump()

    def exits(self) -> list[ProcessExit]:
        """The exits seen so far."""
        known = len(self._exits)
        for member, child in self._children.items():
            status = child.poll()
            if status is not None and member not in self._exits:
                self._exits[member] = self._exit(member, status)
        if len(self._exits) > known:
            self._record(self._entries())
        return list(self._exits.values())

    def any_exiting(self) -> bool:
        """True while a running process has reported that it is about to exit."""
        running = (member for member in self._children if member not in self._exits)
        return any(self._status(member).exiting for member in running)

    def _exit(self, member: JobProcess, status: int) -> ProcessExit:
        return ProcessExit.of(member, status, self._status(member), time.monotonic())

    def _status(self, member: JobProcess) -> ProcessStatus:
        return read(self.run.error_file(member))

    def restart_alone(self, exit_: ProcessExit, left: int) -> None:
        """Restart a process that has exited, while the others continue."""
        member = exit_.member
        self._incarnations[member] = incarnation = self._incarnations.get(member, 0) + 1
        self._release(member)
        self._screen.say(restarting_process(exit_, incarnation, left), Tone.WARNING)
        self._children[member].end()
        # the new incarnation reports it again
        clear_saves_at_sigterm(self.run.error_file(member))
        with self._output(member, incarnation) as output:
            self._children[member] = self._spawn(member, output)
        del self._exits[member]
        self._record(self._entries())

    def _entries(self) -> list[ProcessEntry]:
        return [
            ProcessEntry(
                name=member.name,
                pid=child.pid,
                start=self._start_of(child),
                status=self._exits[member].status if member in self._exits else None,
                restarts=self.run.restart + self._incarnations.get(member, 0),
            )
            for member, child in self._children.items()
        ]

    def _start_of(self, child: Child) -> int | None:
        if child not in self._starts:
            self._starts[child] = start_of(child.pid)
        return self._starts[child]

    def can_stop(self) -> bool:
        """True when all running processes have reported that they save at SIGTERM.

        A restarting process has not reported it yet and does not count.
        """
        running = [member for member in self._children if member not in self._exits]
        ready = [member for member in running if not self._is_restarting(member)]
        return bool(ready) and all(self._status(member).saves_at_sigterm for member in ready)

    def _is_restarting(self, member: JobProcess) -> bool:
        """True while a signal would end a restarted process that does not save yet."""
        return member in self._incarnations and not self._status(member).saves_at_sigterm

    def ask(self, number: int, kinds: Collection[Kind]) -> None:
        """Send a signal to the processes of these kinds and not to their children.

        A restarting process learns of the stop from the others.
        """
        for member, child in self._children.items():
            if member.kind in kinds and not self._is_restarting(member):
                child.ask(number)

    def continue_without(self, exit_: ProcessExit) -> None:
        """Report that the job continues without a process that has exited."""
        self._release(exit_.member)
        self._screen.say(continuing_without(exit_), Tone.PLAIN if exit_.is_done else Tone.WARNING)

    def _release(self, member: JobProcess) -> None:
        if member in self._held:
            self._held[member].release()

    def signal(self, number: int) -> None:
        """Send a signal to all processes and their children."""
        for child in self._children.values():
            child.signal(number)

    def close(self, *, has_failed: bool = False) -> None:
        """End all processes and show the rest of their output.

        After a failure, tracebacks that are still held are not shown: the cause is reported.
        """
        for child in self._children.values():
            child.end()
        for follower in self._followers:
            follower.close()
        for held in self._held.values():
            if has_failed:
                held.discard()
            else:
                held.release()
        for prefixed in self._prefixed:
            prefixed.finish()
        self._children.clear()
        self._followers.clear()


def _is_first(member: JobProcess) -> bool:
    return member.kind is Kind.WORKER and member.index == 0
