# SPDX-License-Identifier: Apache-2.0
"""A server that dies at any moment and is started again has lost nothing that it acknowledged."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ps.lives import IDS, Lives, rows
from tests.ps.serving import (
    Worker,
    closed_server,
    ids_of,
    open_up,
    opened,
    plan,
    rows_of,
    team,
    together,
)

from fleetlight.errors import JournalError, MembershipError, PlanError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.journal.segment import segments
from fleetlight.ps.plan import DensePlan, EntryPlan, RulePlan
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.transport.interface import Connection


def test_rows_dense_values_and_figures_outlive_a_server(lives: Any) -> None:
    one = lives(plan("async"))
    first, second = one.workers
    first.say(m.Fill([1], True), ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32))
    first.push(0, {0: ([1, 2], [1, 2])}, [1, 2, 3])
    second.push(0, {0: ([2], [4])})
    before = one.server.figures()
    one.die()
    first, second = one.workers
    assert first.pull(0, [1, 2], insert=False) == [-1, -6]
    assert first.pull(1, [1, 9], insert=False) == [5, 6]
    assert first.dense() == [6, 6, 6]
    assert one.server.figures() == before
    # and it goes on
    second.push(1, {0: ([2], [1])})
    one.die()
    assert one.workers[0].pull(0, [2], insert=False) == [-7]
    assert one.durability.incarnation == 3


@pytest.mark.parametrize("log", [True, False])
def test_rows_that_were_set_back_outlive_a_server(lives: Any, log: bool) -> None:
    """Those of a state are as in it; all others read what they began with."""
    one = lives(plan("async"), log=log)
    worker = one.workers[0]
    first = worker.pull(0, [1, 2, 3], insert=True)
    worker.push(0, {0: ([1, 2], [4, 4])}, [1, 2, 3])
    assert worker.pull(0, [1, 2, 3], insert=False) != first
    worker.say(m.Fill([0], False, loaded=True, reset=True), ids_of([2]), rows_of([9]))
    one.die()
    worker = one.workers[0]
    assert worker.pull(0, [1, 2, 3], insert=False) == [first[0], 9, first[2]]


def test_first_values_outlive_a_server_that_keeps_snapshots_only(lives: Any) -> None:
    one = lives(plan("sync"), log=False)
    values = ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32)
    one.workers[0].say(m.Fill([1], True), *values)
    one.die()
    assert one.workers[0].pull(1, [1, 9], insert=False) == [5, 6]
    assert one.workers[0].dense() == [7, 8, 9]


def test_a_push_that_was_acknowledged_is_not_made_again(lives: Any) -> None:
    one = lives(plan("async"))
    worker = one.workers[0]
    message = worker.pushed(0, {0: None}, None)
    worker.send(message, {0: ([1], [1])}, None)
    one.die()
    answer, _ = one.workers[0].send(message, {0: ([1], [1])}, None)
    assert answer.applied
    assert one.workers[0].pull(0, [1]) == [-1]


@pytest.mark.parametrize("more", [{"log": True}, {"log": False}])
@pytest.mark.parametrize("snapshots", [0, 1])
def test_a_later_life_refuses_workers_in_whose_place_others_were_started(
    lives: Any, more: dict[str, Any], snapshots: int
) -> None:
    one = lives(plan("async"), **more)
    earlier, later = (m.Greeting("test", 0, 2, 0, 1, 1, "push", True, life) for life in (1, 2))
    one.workers[0].say(later)
    for _ in range(snapshots):
        assert one.durability.snapshot()
    for _ in range(2):
        one.die(back=[1])
        with pytest.raises(
            MembershipError, match=r"worker 0 has been .* but its incarnation 1 still"
        ):
            one.server(Connection("the earlier life"), earlier, [])
    one.server(Connection("the later life"), later, [])


def test_a_push_whose_record_was_torn_is_made_anew(lives: Any) -> None:
    one = lives(plan("async"))
    worker = one.workers[0]
    worker.push(0, {0: ([1], [1])})
    message = worker.pushed(1, {0: None}, None)
    worker.send(message, {0: ([1], [10])}, None)
    path = segments(one.folder)[-1][1]
    os.truncate(path, path.stat().st_size - 1)
    one.die()
    assert one.workers[0].pull(0, [1]) == [-1]
    one.workers[0].send(message, {0: ([1], [10])}, None)
    assert one.workers[0].pull(0, [1]) == [-11]


def test_a_step_of_all_is_made_once_whoever_had_its_answer(lives: Any) -> None:
    one = lives(plan("sync"))
    first, second = one.workers
    messages = [worker.pushed(0, {0: None}, None) for worker in (first, second)]
    gradients = {0: ([1], [2])}
    one.send(messages, gradients)
    one.die()
    first, second = one.workers
    # the first had it and goes on, the second asks again and then goes on, too
    answer, _ = second.send(messages[1], gradients, None)
    assert answer.applied
    answers = together(lambda: first.push(1, gradients), lambda: second.push(1, gradients))
    assert all(answer.applied for answer, _ in answers)
    assert rows(first)[IDS.index(1)] == -4


def test_a_step_of_which_one_part_had_come_is_waited_for(lives: Any) -> None:
    one = lives(plan("sync"))
    together(lambda: one.workers[0].push(0, {0: ([1], [2])}), lambda: one.workers[1].push(0))
    one.die()
    first, second = one.workers
    together(lambda: first.push(1, {0: ([1], [2])}), lambda: second.push(1, {0: ([1], [4])}))
    assert first.pull(0, [1]) == [-4]


def test_a_skipped_step_is_still_a_skipped_one(lives: Any) -> None:
    one = lives(plan("sync"))
    messages = [worker.pushed(0, {}, None, skip=True) for worker in one.workers]
    one.send(messages, {})
    one.die()
    for worker, message in zip(one.workers, messages, strict=True):
        answer, _ = worker.send(message, {}, None)
        assert not answer.applied
    # the same step counter comes again
    first, second = one.workers
    answers = together(
        lambda: first.push(0, {0: ([1], [2])}), lambda: second.push(0, {0: ([1], [2])})
    )
    assert [answer.applied for answer, _ in answers] == [True, True]


@pytest.mark.parametrize("when", ["held", "snapshot", "released"])
def test_gradients_that_are_held_stay_held(lives: Any, when: str) -> None:
    one = lives(plan("sync"))
    held = [worker.pushed(0, {0: None}, None, hold=True) for worker in one.workers]
    squares = [answer.square for answer, _ in one.send(held, {0: ([1], [4])})]
    if when == "released":
        together(*(lambda w=w: w.apply(0, 0.5) for w in one.workers))
    if when == "snapshot":
        assert one.durability.snapshot()
    one.die()
    first, second = one.workers
    assert one.server._service is not None
    # a worker that resumes with all knows of the others only
    known = one.server._service.pushes.last_push(0, 1)
    assert known == (first.sequence, int(when != "released"))
    if when == "held":
        # an answer that was lost
        answer, _ = second.send(held[1], {0: ([1], [4])}, None)
        assert answer.square == squares[1]
    if when != "released":
        together(*(lambda w=w: w.apply(0, 0.5) for w in one.workers))
    assert first.pull(0, [1]) == [-2]
    answers = together(
        lambda: first.push(1, {0: ([1], [1])}), lambda: second.push(1, {0: ([1], [1])})
    )
    assert all(answer.applied for answer, _ in answers)


def test_a_meeting_that_is_over_is_remembered(lives: Any) -> None:
    one = lives(plan("async"))
    first, second = one.workers
    together(lambda: first.meet(0, "barrier", 3), lambda: second.meet(0, "barrier", 4))
    one.die()
    # its answer was lost; the other one is further
    first, second = one.workers
    assert [list(array) for array in second.meet(0, "barrier", 4)] == [[3], [4]]
    answers = together(lambda: first.meet(1, "sum", 5), lambda: second.meet(1, "sum", 6))
    assert [[list(array) for array in answer] for answer in answers] == [[[5], [6]]] * 2


def test_nobody_else_may_have_the_folder(lives: Any, tmp_path: Path) -> None:
    one = lives(plan("async"))
    with pytest.raises(JournalError, match=r"in use by another process \(process "):
        Lives(one.folder, plan("async"))


def test_what_another_job_has_left_is_not_taken_up_unasked(tmp_path: Path) -> None:
    Lives(tmp_path, plan("async")).end()
    for job in ("another", ""):
        with pytest.raises(
            JournalError, match="has the state of a job that did not finish; resume that job"
        ):
            open_up(closed_server(), plan("async"), Durable(tmp_path, job=job))
    server = closed_server()
    open_up(server, plan("async"), Durable(tmp_path, job="another", resume=True))
    server.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_other_workers_may_go_on_with_the_values(tmp_path: Path, mode: str) -> None:
    one = Lives(tmp_path, plan(mode, workers=1))
    one.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    one.workers[0].meet(1, "barrier")
    one.workers[0].say(m.EndPhase(0))
    one.workers[0].push(1, phase=1, hold=mode == "sync")
    one.workers[0].say(m.Leave("an error"))
    one.server.close()
    again = closed_server(1)
    open_up(again, plan(mode, workers=1), Durable(tmp_path, job="another", resume=True))
    worker = Worker(again, 0, 1)
    worker.meet(1, "barrier")
    answer, _ = worker.push(0, {0: ([1], [1])}, [1, 1, 1])
    assert answer.applied
    assert worker.pull(0, [1]) == [-2]
    assert worker.dense() == [-1, -1, -1]
    again.close()


def test_where_workers_begin_anew_so_do_servers(tmp_path: Path) -> None:
    one = Lives(tmp_path, plan("async"))
    one.workers[0].push(0, {0: ([1], [1])})
    assert one.durability.snapshot()
    one.end()
    again = closed_server()
    open_up(again, plan("async"), Durable(tmp_path, job="a job", start=1))
    assert Worker(again, 0).pull(0, [1]) == [0]
    again.close()


USERS, ITEMS = plan().tables
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 7}, "seed: 7 here, 0 there"),
    "dim": (
        {"tables": [USERS, msgspec.structs.replace(ITEMS, dim=3)]},
        "tables[items].dim: 3 here, 2 there",
    ),
    "name": (
        {"tables": [msgspec.structs.replace(USERS, name="people"), ITEMS]},
        "tables[people]: 'present' here, 'absent' there",
    ),
    "one more table": (
        {"tables": [USERS, ITEMS, msgspec.structs.replace(ITEMS, name="shops")]},
        "tables[shops]: 'present' here, 'absent' there",
    ),
    "one table less": (
        {"tables": [USERS]},
        "tables[items]: 'absent' here, 'present' there",
    ),
    "rule": (
        {"tables": [USERS, msgspec.structs.replace(ITEMS, rule=RulePlan("adam", {}))]},
        "tables[items].rule.name: 'adam' here, 'sgd' there",
    ),
    "elements": (
        {"dense": [DensePlan("bias", (4,), "float32", 0, 0)]},
        "dense[bias].shape: (4,) here, (3,) there",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_script_is_told_what_differs(tmp_path: Path, other: str) -> None:
    one = Lives(tmp_path, plan("async"))
    one.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    one.end()
    facts, difference = OTHERS[other]
    durable = Durable(tmp_path, job="another", resume=True)
    text = f"was written by another script or with other settings: plan.{difference}; run the same"
    server = closed_server()
    with pytest.raises(PlanError, match=re.escape(text)):
        open_up(server, plan("async", **facts), durable)
    server.close()
    # for which it is all there still
    again = closed_server()
    open_up(again, plan("async"), durable)
    worker = Worker(again, 0)
    assert (worker.pull(0, [1]), worker.dense()) == ([-1], [0, 0, 0])
    again.close()


def test_a_damaged_journal_is_no_shorter_one(lives: Any) -> None:
    one = lives(plan("async"))
    for step in range(3):
        one.workers[0].push(step, {0: ([1], [1])})
    path = segments(one.folder)[0][1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"is damaged at byte \d+: .*behind it lies record"):
        one.die()


def test_differences_of_geo_are_added_once(lives: Any) -> None:
    one = lives(plan("geo", k_steps=2))
    worker = one.workers[0]
    message = m.GeoExchange(0, 0, 1, [0], dense=True)
    arrays = [ids_of([1, 2]), rows_of([1, 2]), np.array([1, 1, 1], np.float32)]
    worker.say(message, *arrays, lane="push")
    one.die()
    for _ in range(2):
        one.workers[0].say(message, *[a.copy() for a in arrays], lane="push")
    assert one.workers[0].pull(0, [1, 2]) == [1, 2]
    assert one.workers[0].dense() == [2, 2, 2]


def test_rows_that_were_only_read_are_there_still(lives: Any) -> None:
    one = lives(plan("async"))
    one.workers[0].pull(0, [1, 2, 3])
    one.workers[0].pull(0, [9], insert=False)
    # rows may be written down later than they are read
    one.workers[0].push(0)
    one.die()
    assert one.server.figures().rows == {"users": 3, "items": 0}


@pytest.mark.slow
def test_counts_of_ids_and_days_outlive_a_server(lives: Any) -> None:
    """A click gives an id its score, which a day makes less: who dies must forget neither."""
    entry = EntryPlan("count", 2.0)
    tables = [msgspec.structs.replace(table, entry=entry) for table in plan().tables]
    mortal, other = lives(plan("async", tables=tables)), opened(plan("async", tables=tables))
    heard: list[list[Any]] = [[], []]
    for day in range(4):
        for worker, told in zip((mortal.workers[0], Worker(other, 0)), heard, strict=True):
            worker.sequence = 2 * day
            worker.pull(0, IDS[: 8 - 2 * day])
            worker.pull(0, [1])
            worker.push(day, {0: (IDS, [1.0] * 8)})
            told.append(rows(worker))
            told.append(worker.say(m.Shrink(0, 1, 0.0, 0.5)))
        mortal.die()
    assert heard[0] == heard[1]
    # ids were let in, and forgotten
    assert len({str(one) for one in heard[1]}) > 4


@pytest.mark.slow
def test_a_checkpoint_that_was_loaded_is_there_still(lives: Any, tmp_path: Path) -> None:
    one = lives(plan("async"))
    worker = one.workers[0]
    worker.push(0, {0: ([1, 2], [1, 2])}, [1, 1, 1])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "token").write_text("")
    saved, _ = worker.say(m.Save(str(folder), "token", 0))
    state, arrays = worker.say(m.FetchDense())
    worker.push(1, {0: ([1, 5], [7, 7])}, [9, 9, 9])
    worker.say(m.Load(str(folder), [(f.table, f.name) for f in saved.files], epoch=1))
    worker.say(m.RestoreDense(state.state, state.scalars), *arrays)
    shutil.rmtree(folder)
    one.die()
    worker = one.workers[0]
    assert worker.pull(0, [1, 2, 5], insert=False) == [-1, -2, 0]
    assert worker.dense() == [0, 0, 0]
    with pytest.raises(ProtocolError, match="pushed for epoch 0"):
        worker.push(2)


OPERATIONS = st.one_of(
    st.tuples(
        st.just("push"),
        st.integers(0, 1),
        st.lists(st.tuples(st.sampled_from(IDS), st.integers(-4, 4)), max_size=4),
    ),
    st.tuples(st.sampled_from(["die", "again", "snapshot", "tear"])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATIONS, max_size=25))
def test_whatever_happens_each_push_counts_once(operations: list[Any]) -> None:
    """Pushes of whole numbers, answers that are lost, records that are torn, snapshots, deaths."""
    expected = dict.fromkeys(IDS, 0)
    with tempfile.TemporaryDirectory() as folder:
        one = Lives(Path(folder), plan("async"))
        steps, last = [0, 0], None
        for name, *arguments in operations:
            if name == "push":
                who, changes = arguments
                gradients = {0: ([i for i, _ in changes], [float(n) for _, n in changes])}
                message = one.workers[who].pushed(steps[who], gradients, None)
                last = who, message, gradients
                one.workers[who].send(message, gradients, None)
                steps[who] += 1
                for i, n in changes:
                    expected[i] -= n
            elif name == "again" and last is not None:
                who, message, gradients = last
                one.workers[who].send(message, gradients, None)
            elif name == "snapshot":
                assert one.durability.snapshot()
            elif name == "tear":
                with segments(one.folder)[-1][1].open("ab") as file:
                    file.write(b"\xf1JNL torn")
                one.die()
            elif name == "die":
                one.die()
        assert rows(one.workers[0]) == list(expected.values())
        one.end()


def test_without_durability_nothing_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    worker = team(opened(plan("async")))[0]
    worker.push(0, {0: ([1], [1])})
    assert list(tmp_path.iterdir()) == []
