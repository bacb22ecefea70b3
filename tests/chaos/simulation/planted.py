# SPDX-License-Identifier: Apache-2.0
"""Bugs to plant, one at a time: a simulation that misses one would miss others, too."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from tests.chaos.simulation import forming
from tests.chaos.simulation.elastic.planted import ELASTIC
from tests.chaos.simulation.worker import Worker

from fleetlight.launch.processes.watch import Watch
from fleetlight.ps import messages as m
from fleetlight.ps.high_water_marks import HighWaterMarks
from fleetlight.ps.rendezvous.directory import Directory
from fleetlight.ps.server import server
from fleetlight.ps.server.durability.persistent_state import PersistentState
from fleetlight.ps.server.membership import WorkerMembership
from fleetlight.ps.server.steps import request_dedup as tickets
from fleetlight.ps.server.steps.prefetched_ids import PrefetchedIds
from fleetlight.ps.server.steps.progress import Clocks, TrainingProgress
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.steps.step_groups import StepGroups
from fleetlight.ps.server.workers.barriers import Barriers
from fleetlight.ps.server.write_ahead_log import WriteAheadLog

Patch = tuple[Any, str, Any]


def _redo_unmarked(real: Callable[..., None]) -> Callable[..., None]:
    def redo(kept: PersistentState, change: Any, arrays: Sequence[Any]) -> None:
        marks = kept.pushes.progress.marks
        before = marks.marks()
        real(kept, change, arrays)
        marks.restore(marks.epoch, before)

    return redo


def _accept_any_incarnation(
    self: HighWaterMarks, worker: int, started_at: int, epoch: int, sequence: int
) -> bool:
    incarnation = self._last.get(worker)
    return (
        incarnation is None
        or incarnation.started_at != started_at
        or sequence > incarnation.sequence
    )


def _one_too_few(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda clocks, phase, at_least: real(clocks, phase, at_least - 1)


def _first_waits_for_none(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda steps, phase: real(steps, phase)[:1]


def _backwards(real: Callable[..., Any]) -> Callable[..., Any]:
    def result(meetings: Barriers[Any], meeting: int) -> Any:
        found = real(meetings, meeting)
        return found if found is None or len(found) < 3 else found[::-1]

    return result


def _without_marks(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ledger: msgspec.structs.replace(real(ledger), marks=[])


def _put_first(
    self: WriteAheadLog, change: Any, arrays: Sequence[Any], act: Callable[[], Any]
) -> Any:
    """Apply the change before it is in the log."""
    if self._journal is None or not self.logs_values:
        return act()
    result = act()
    self._journal.framed(change, arrays)
    return result


def _under_new_numbers(real: Callable[..., Any]) -> Callable[..., Any]:
    def send_again(worker: Worker) -> Any:
        for place, (message, arrays) in worker.redo.last.items():
            changed: Any = msgspec.structs.replace(message, sequence=worker._next(place))
            worker.redo.last[place] = changed, arrays
        return real(worker)

    return send_again


def _settle_late(self: WriteAheadLog) -> None:
    """Commit with the next reply."""
    if self._journal is not None:
        self._journal.commit(self._journal.next - 2)


def _with_first_rows(real: Callable[..., Any]) -> Callable[..., Any]:
    def reply(pushes: Any, peer: Any, message: Any, *args: Any) -> Any:
        made, arrays = real(pushes, peer, message, *args)
        count = len(message.ahead)
        return made, [*map(np.zeros_like, arrays[:count]), *arrays[count:]]

    return reply


_UNSETTLED = (*server._UNSETTLED, m.Pull)

PLANTED: dict[str, Sequence[Patch]] = {
    "a mark is not booked": [(HighWaterMarks, "applied", lambda *_: None)],
    "a push in progress is not known": [(tickets, "_same", lambda *_: False)],
    "the reply leaves before the commit": [(WriteAheadLog, "wait_on_disk", _settle_late)],
    "a change is made and never put": [(WriteAheadLog, "apply", _put_first)],
    "a change that is made again is not booked": [
        (PersistentState, "redo", _redo_unmarked(PersistentState.redo))
    ],
    "what is not committed is told to readers": [(server, "_UNSETTLED", _UNSETTLED)],
    "a snapshot forgets which pushes came": [
        (TrainingProgress, "state", _without_marks(TrainingProgress.state))
    ],
    "staleness is off by one": [(Clocks, "behind", _one_too_few(Clocks.behind))],
    "an earlier incarnation is accepted": [(HighWaterMarks, "is_new", _accept_any_incarnation)],
    "a worker that returns sends under new numbers": [
        (Worker, "_send_again", _under_new_numbers(Worker._send_again))
    ],
    "a worker that returns does not send again": [(Worker, "_send_again", lambda _: iter(()))],
    "a step waits for the first only": [
        (StepGroups, "_expected", _first_waits_for_none(StepGroups._expected))
    ],
    "a worker's end completes no step": [(StepGroups, "end", lambda *_: [])],
    "the end of one connection is taken for that of its worker": [
        (WorkerMembership, "_lose_unconnected", lambda self, *of: self._presence.lose(*of))
    ],
    "rows pulled ahead stay old": [(PrefetchedIds, "take", lambda *_: [])],
    "the reply to a push has the rows of the start": [
        (PushHandler, "_push_reply", _with_first_rows(PushHandler._push_reply))
    ],
    "a meeting is told backwards": [(Barriers, "result", _backwards(Barriers.result))],
    "a process that ignores SIGTERM is not killed": [(Watch, "_end", lambda *_: None)],
    "an older process of a server is accepted again": [
        (Directory, "_refuse_older", lambda *_: None)
    ],
    "a directory ignores what workers report": [(Directory, "learn", lambda *_: None)],
    "no process may replace a server": [(Directory, "vacant", lambda *_: [])],
    "the last member gets the first index": [
        (forming, "assign_indices", lambda hellos: [0] * len(hellos))
    ],
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """A block with this bug in the package."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in {**PLANTED, **ELASTIC}[name]:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield
