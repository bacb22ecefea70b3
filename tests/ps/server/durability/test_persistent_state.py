# SPDX-License-Identifier: Apache-2.0
"""What is kept of a server: what says something of workers is not said of others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.ps.server.durability.test_durability import Lives
from tests.ps.serving import Worker, ask, closed_server, open_up, opened, plan, together

from fleetlight.ps import messages as m
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.workers.roster import HERE

PLAN = plan("async", workers=1)


def left_by_an_earlier_job(folder: Path) -> None:
    """A worker has trained, met, taken records, and gone."""
    one = Lives(folder, PLAN)
    worker = one.workers[0]
    worker.push(0, {0: ([1], [1])}, phase=3)
    for meeting in (1, 2, 3):
        worker.meet(meeting, "barrier")
    worker.say(ask())
    worker.say(m.Leave())
    one.durability._over.set()
    one.server._roster._fail("so that all is kept")
    one.server.close()


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_day_that_two_lives_of_a_worker_end_is_one_day(tmp_path: Path, is_cut: bool) -> None:
    entry = EntryPlan("count", 2.0)
    tables = [msgspec.structs.replace(table, entry=entry) for table in PLAN.tables]
    counting = plan("async", workers=1, tables=tables)
    one, other = Lives(tmp_path, counting), Worker(opened(counting), 0, 1)
    for id_ in (1, 1, 1, 2):
        one.workers[0].pull(0, [id_])
        other.pull(0, [id_])
    days = [m.Shrink(0, 0, 0.1, 0.5, number) for number in (7, 8, 9)]
    told = [other.say(day) for day in days]
    for day, once in zip(days, told, strict=True):
        assert one.workers[0].say(day) == once
        assert one.workers[0].say(day) == once
        if is_cut:
            assert one.durability.snapshot()
        one.die(back=[0])
        assert one.workers[0].say(day) == once
    one.workers[0].say(m.Leave("an error"))
    one.server.close()
    # calls of other workers have numbers of their own
    again = closed_server(1)
    open_up(again, counting, Durable(tmp_path, job="another", resume=True))
    assert again._service is not None
    assert again._service.state.shrunk() == []
    again.close()


def taken_up(folder: Path, server: Server) -> Server:
    open_up(server, PLAN, Durable(folder, job="another", resume=True))
    return server


def test_workers_that_have_met_before_their_server_takes_up_its_values(tmp_path: Path) -> None:
    left_by_an_earlier_job(tmp_path)
    server = closed_server(1)
    worker = Worker(server, 0, 1)
    worker.meet(1, "barrier")
    taken_up(tmp_path, server)
    last = server._membership.barriers.last
    assert last is not None
    assert (last[0], server._roster.in_state(HERE)) == (1, [0])
    worker.meet(2, "barrier")
    assert worker.pull(0, [1]) == [-1]
    server.close()


def test_nor_does_the_next_life_know_who_worked_for_an_earlier_job(tmp_path: Path) -> None:
    left_by_an_earlier_job(tmp_path)
    server = taken_up(tmp_path, closed_server(1))
    worker = Worker(server, 0, 1)
    worker.meet(1, "barrier")
    worker.push(0, {0: ([1], [1])})
    server._roster._fail("so that all is kept")
    server.close()
    again = taken_up(tmp_path, closed_server(1))
    assert again._membership.barriers.last is not None
    assert again._membership.barriers.last[0] == 1
    assert again._membership.shard_queue.queue.state().turns == []
    assert again._service is not None
    assert again._service.pushes.progress.clocks.state()[0] == {0: (0, 1)}
    assert Worker(again, 0, 1).pull(0, [1]) == [-2]
    again.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_gradients_that_were_held_are_lost_where_snapshots_alone_are_kept(
    tmp_path: Path, is_kept: bool
) -> None:
    """As is all that came behind the last snapshot; the workers go on."""
    one = Lives(tmp_path, plan("sync"), log=False)
    together(*(lambda w=w: w.push(0, {0: ([1], [4])}) for w in one.workers))
    if not is_kept:
        assert one.durability.snapshot()
    held = [worker.pushed(1, {0: None}, None, hold=True) for worker in one.workers]
    one.send(held, {0: ([1], [4])})
    if is_kept:
        assert one.durability.snapshot()
    one.die()
    first, second = one.workers
    answers = together(*(lambda w=w: w.apply(1, 0.5) for w in one.workers))
    assert [answer.applied for answer, _ in answers] == [True, True]
    first.sequence -= 1
    answer, _ = first.apply(1, 0.5)
    assert answer.applied
    assert first.pull(0, [1]) == [-4]
    answers = together(
        lambda: first.push(2, {0: ([1], [1])}), lambda: second.push(2, {0: ([1], [1])})
    )
    assert all(answer.applied for answer, _ in answers)
    assert first.pull(0, [1]) == [-5]
    held = [worker.pushed(3, {0: None}, None, hold=True) for worker in one.workers]
    one.send(held, {0: ([1], [4])})
    together(*(lambda w=w: w.apply(3, 0.5) for w in one.workers))
    assert first.pull(0, [1]) == [-7]
    one.end()
