# SPDX-License-Identifier: Apache-2.0
"""Company: what the next life of a server knows of who has come, left or got lost."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.ps.server.durability.test_durability import Lives
from tests.ps.serving import (
    Worker,
    closed_server,
    open_up,
    plan,
    together,
)

from fleetlight.errors import MembershipError
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import remains
from fleetlight.ps.plan import Plan
from fleetlight.ps.resume import OVER
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.workers import presence as attendance
from fleetlight.ps.server.workers.roster import ABSENT, LOST


@pytest.fixture
def lives(tmp_path: Path) -> Any:
    made: list[Lives] = []

    def make(the_plan: Plan) -> Lives:
        made.append(Lives(tmp_path / "kept", the_plan))
        return made[-1]

    yield make
    for one in made:
        one.end()


def test_whoever_has_left_is_not_waited_for(lives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lives(plan("sync"))
    first, second = one.workers
    together(lambda: first.push(0), lambda: second.push(0))
    second.leave()
    server = one.server
    one.durability._over.set()
    one.durability._snapshots.join()
    one.durability._folder._lock.release()
    one.server = one._start()
    assert one.server is not server
    again = Worker(one.server, 0)
    again.sequence = first.sequence
    answer, _ = again.push(1, {0: ([1], [3])})
    assert answer.applied
    # the other one may not have heard the answer of the life before, and has time to ask again
    later = time.monotonic() + attendance._LINGER_S
    monkeypatch.setattr(one.server._presence, "_clock", lambda: later)
    again.leave()
    one.server.wait()
    one.server.close()
    # a job that has ended well leaves nothing that the next one would stumble over
    assert {path.name for path in one.folder.iterdir()} == {"lock", "identity.json"}
    assert remains(one.folder).state == OVER


@pytest.mark.slow
@pytest.mark.parametrize("snapshot", [False, True])
def test_whoever_was_lost_is_lost_to_the_next_life(lives: Any, snapshot: bool) -> None:
    one = lives(plan("sync", lost_worker="go_on"))
    one.workers[1].hang_up()
    one.server._membership._look()
    assert one.server._roster.in_state(LOST) == [1]
    if snapshot:
        assert one.durability.snapshot()
    one.die(back=[0])
    assert one.server._roster.in_state(LOST) == [1]
    with pytest.raises(MembershipError, match="worker 1 returned after it had gone"):
        Worker(one.server, 1)
    first = one.workers[0]
    assert first.push(0, {0: ([1], [3])})[0].applied
    assert [list(array) for array in first.meet(0, "barrier", 3)] == [[3]]
    first.leave()
    one.server.wait()


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_whoever_does_not_come_to_the_next_life_is_lost(
    lives: Any, mode: str, snapshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lives(plan(mode, lost_worker="go_on"))
    if snapshot:
        assert one.durability.snapshot()
    # the life between has not seen it either
    one.die(back=[0])
    one.die(back=[0])
    assert one.server._roster.in_state(ABSENT) == [1]
    later = time.monotonic() + one.durable.away_s + 1.0
    monkeypatch.setattr(one.server._presence, "_clock", lambda: later)
    (first,) = one.workers
    first.say(m.Heartbeat(0))
    one.server._membership._look()
    assert one.server._roster.in_state(LOST) == [1]
    assert first.push(0, {0: ([1], [3])})[0].applied
    assert [list(array) for array in first.meet(0, "barrier", 3)] == [[3]]
    first.leave()
    one.server.wait()


def test_who_comes_while_a_journal_begins_is_known_to_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, durable = closed_server(), Durable(tmp_path / "kept", job="a job")
    put, coming = Durability._put_baseline, threading.Thread(target=Worker, args=(server, 1))

    def one_comes(durability: Durability, *more: Any) -> None:
        put(durability, *more)
        # it is let in once what it does is written down
        coming.start()

    with monkeypatch.context() as patch:
        patch.setattr(Durability, "_put_baseline", one_comes)
        open_up(server, plan("async"), durable)
    coming.join()
    Worker(server, 0).push(0, {0: ([1], [3])})
    server.close()
    again = closed_server()
    open_up(again, plan("async"), durable)
    assert again._roster.in_state(ABSENT) == [0, 1]
    assert again._roster.overdue(math.inf) == [0, 1]
    again.close()


def test_who_makes_way_holds_nothing_that_a_step_waits_for(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that this completes takes the values lock, which comes before `changed`."""
    one = lives(plan("sync"))
    one.workers[1].leave()
    free: list[bool] = []
    leave = PushHandler.leave

    def observed(pushes: PushHandler, worker: int) -> None:
        def take() -> bool:
            taken = pushes._changed.acquire(blocking=False)
            if taken:
                pushes._changed.release()
            return taken

        free.extend(together(take))
        leave(pushes, worker)

    monkeypatch.setattr(PushHandler, "leave", observed)
    one.die(back=[0])
    # as it is read back, and as the server opens
    assert free == [True, True]
