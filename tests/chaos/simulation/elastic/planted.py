# SPDX-License-Identifier: Apache-2.0
"""Bugs to plant in the code with which workers join and leave, one at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from fleetlight.fleet.served.joining_job import JoiningReplay
from fleetlight.ps import changes as c
from fleetlight.ps import messages as m
from fleetlight.ps.server.durability.persistent_state import PersistentState
from fleetlight.ps.server.shard_queue.admissions import Admissions
from fleetlight.ps.server.shard_queue.handler import ShardQueueHandler
from fleetlight.ps.server.shard_queue.shard_queue import ShardQueue
from fleetlight.ps.server.steps.progress import Clocks
from fleetlight.ps.server.steps.step_groups import StepGroups
from fleetlight.ps.server.workers.barriers import Barriers
from fleetlight.ps.server.workers.roster import Roster
from fleetlight.ps.worker.connections import CONTROL
from fleetlight.ps.worker.joining import OfferedTurn, RunningJob

Patch = tuple[Any, str, Any]


def _enter_last_on_0(self: RunningJob, admission: OfferedTurn, phase: int) -> bool:
    message, client = m.Enter(phase, admission.loader, admission.turn), self._client
    client.ask(CONTROL, dict.fromkeys(range(1, client.server_num), (message, ())))
    reply = client.ask(CONTROL, {0: (message, ())})[0].message
    return isinstance(reply, m.Entered) and reply.is_member


def _released_at_once(real: Callable[..., bool]) -> Callable[..., bool]:
    def enter(self: Admissions, worker: int, turn: Any) -> bool:
        entered = real(self, worker, turn)
        self._entering.discard(worker)
        return entered

    return enter


def _without_free_records(real: Callable[..., None]) -> Callable[..., None]:
    def end_cut(self: ShardQueue, loader: int, number: int) -> None:
        turn = self._turns.get((loader, number))
        if turn is not None and turn.is_cut and len(turn.free) > 1:
            turn.free = turn.free[:1]
        real(self, loader, number)

    return end_cut


def _without_end(self: Clocks, worker: int, phase: int) -> None:
    self._applied[worker] = phase, 0


def _one_phase_early(real: Callable[..., None]) -> Callable[..., None]:
    def enter(self: StepGroups[Any], worker: int, phase: int) -> None:
        real(self, worker, phase + 1)

    return enter


def _forgetting(kind: type) -> Callable[..., None]:
    real = PersistentState.redo

    def redo(self: PersistentState, change: Any, arrays: Sequence[Any]) -> None:
        if not isinstance(change, kind):
            real(self, change, arrays)

    return redo


def _without_barriers(real: Callable[..., None]) -> Callable[..., None]:
    def replay_entry(self: PersistentState, change: c.WorkerEntered) -> None:
        real(self, change)
        self.barriers.leave(change.worker)

    return replay_entry


def _one_barrier_more(real: Callable[..., Any]) -> Callable[..., Any]:
    def loop_begins(self: JoiningReplay, loader: int) -> None:
        was_catching_up = self.is_catching_up
        real(self, loader)
        if was_catching_up:
            self._session.client.replies.meetings += 1

    return loop_begins


ELASTIC: dict[str, Sequence[Patch]] = {
    "a turn begins before all servers know the newcomer": [
        (Admissions, "enter", _released_at_once(Admissions.enter))
    ],
    "server 0 is the last to enter a newcomer": [(RunningJob, "enter", _enter_last_on_0)],
    "a turn that is cut forgets free records": [
        (ShardQueue, "_end_cut", _without_free_records(ShardQueue._end_cut))
    ],
    "no worker waits for the steps of a newcomer": [(Clocks, "enter", _without_end)],
    "steps do not wait for a newcomer in its first phase": [
        (StepGroups, "enter", _one_phase_early(StepGroups.enter))
    ],
    "barriers do not wait for a newcomer": [(Barriers, "join", lambda *_: None)],
    "barriers wait for a newcomer before it takes part": [(Roster, "joining", lambda _: [])],
    "a newcomer counts one barrier too many": [
        (JoiningReplay, "loop_begins", _one_barrier_more(JoiningReplay.loop_begins))
    ],
    "barriers of a restarted server forget newcomers": [
        (PersistentState, "_replay_entry", _without_barriers(PersistentState._replay_entry))
    ],
    "a restarted server forgets that all servers know a newcomer": [
        (PersistentState, "redo", _forgetting(c.WorkerEnteredAll))
    ],
    "the leases of a worker that leaves stay with it": [
        (ShardQueueHandler, "leave", lambda *_: None),
        (ShardQueueHandler, "lose", lambda *_: None),
    ],
    "a lost worker enters": [(Roster, "check_trains", lambda *_: None)],
    "a server takes a newcomer for the last worker in its place": [
        (Roster, "_refuse_taken", lambda *_: None)
    ],
}
