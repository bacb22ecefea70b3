# SPDX-License-Identifier: Apache-2.0
"""Dealing: what is answered to those who ask for records, and what of it outlives a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ps.server.durability.test_durability import Lives
from tests.ps.serving import Worker, ask, closed_server, open_up, opened, plan, team, together

from fleetlight.errors import MembershipError
from fleetlight.ps import messages as m
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.shard_queue import handler as dealing


def dealt(worker: Worker, *arguments: Any, **facts: Any) -> tuple[int, int] | None:
    answer, _ = worker.say(ask(*arguments, **facts))
    return (answer.start, answer.stop) if isinstance(answer, m.LeaseReply) else None


def remaining(worker: Worker) -> Any:
    return worker.say(m.RemainingRequest(0, 1))[0].ranges


def test_workers_ask_for_ranges() -> None:
    first, second = team(opened(plan("async")))
    assert (dealt(first), dealt(second), dealt(first, 1)) == ((0, 16), (16, 32), (32, 48))
    assert second.say(m.LeaseProgress(0, 1, (0, 20)))[0] == m.Done()
    assert remaining(first) == [(0, 16), (20, 96)]
    assert first.say(m.RemainingRequest(0, 2))[0] == m.Remaining(None)


def test_who_waits_is_told_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "_WAIT_S", 0.01)
    first, second = team(opened(plan("async")))
    whole = [(0, 4)]
    dealt(first, whole=whole)
    assert dealt(second, whole=whole) is None
    assert dealt(second, whole=whole, waits=True) is None


def test_who_waits_is_told_at_once_when_there_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "_WAIT_S", 100.0)
    server = opened(plan("async"))
    first, second = team(server)
    whole = [(0, 4)]
    dealt(first, whole=whole)

    def finish() -> None:
        with server._changed:
            server._changed.wait_for(lambda: server._membership.shard_queue.queue.waits_for(1), 20)
        first.say(m.LeaseProgress(0, 1, (0, 4)), lane="pull")

    told, _ = together(lambda: dealt(second, whole=whole, waits=True), finish)
    assert told is None
    assert dealt(second, whole=whole, waits=True) == (0, 0)


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_what_is_in_hand_is_dealt_out_again(how: str, caplog: pytest.LogCaptureFixture) -> None:
    server = opened(plan("async"))
    first, second = team(server)
    dealt(first)
    dealt(second)
    dealt(first, 1, (0, 12))
    if how == "leaves":
        first.say(m.Leave())
    else:
        with server._changed:
            server._membership.shard_queue.lose(0)
    said = "has left" if how == "leaves" else "was lost"
    assert caplog.messages == [
        f"worker 0 {said} before it finished records 12 to 15 and 32 to 47 of epoch 0; other "
        "workers get them"
    ]
    assert [dealt(second, n) for n in (1, 2)] == [(12, 16), (32, 48)]


def test_a_worker_that_has_done_all_leaves_without_a_word(caplog: Any) -> None:
    first, _ = team(opened(plan("async")))
    dealt(first)
    first.say(m.LeaseProgress(0, 1, (0, 16)))
    first.say(m.Leave())
    assert caplog.messages == []


def test_a_meeting_that_waits_for_a_worker_that_waits_for_records() -> None:
    server = opened(plan("async"))
    first, second = team(server)
    whole = [(0, 4)]
    dealt(first, whole=whole)

    def wait() -> None:
        while isinstance(second.say(ask(whole=whole, waits=True), lane="pull")[0], m.Done):
            with server._changed:
                if server._membership.barriers._broken is not None:
                    return

    met, _ = together(lambda: first.meet(0, "save_persistables"), wait)
    assert isinstance(met, MembershipError)
    assert "save_persistables of worker 0 would wait for worker 1, which has no records" in str(met)
    assert "call it after the loop" in str(met)


# -- what outlives a server ------------------------------------------------------------------


@pytest.fixture
def one(tmp_path: Path) -> Any:
    lives = Lives(tmp_path / "kept", plan("async"))
    yield lives
    lives.end()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_server_knows_what_it_had_dealt_out(one: Lives, snapshot: bool) -> None:
    first, second = one.workers
    dealt(first)
    dealt(second)
    dealt(first, 1, (0, 12))
    second.say(m.LeaseProgress(0, 1, (0, 20)))
    if snapshot:
        assert one.durability.snapshot()
    one.die()
    first, second = one.workers
    assert remaining(first) == [(12, 16), (20, 96)]
    # an answer that was lost, and what comes next
    assert [dealt(first, n) for n in (1, 2)] == [(32, 48), (48, 60)]
    assert [dealt(second, n) for n in (0, 1)] == [(16, 32), (60, 72)]


@pytest.mark.parametrize("how", ["leaves", "is lost", "gives back"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_server_knows_what_it_has_to_deal_out_again(one: Lives, how: str, snapshot: bool) -> None:
    first, second = one.workers
    dealt(first)
    dealt(second)
    if how == "leaves":
        first.say(m.Leave())
    elif how == "gives back":
        first.say(m.LeaseProgress(0, 1, (0, 0), gives_back=True))
    else:
        with one.server._changed:
            one.server._membership.shard_queue.lose(0)
        one.server._log.wait_on_disk()
    if snapshot:
        assert one.durability.snapshot()
    with one.server._changed:
        before = one.server._membership.shard_queue.queue.state()
    one.die(back=[1])
    with one.server._changed:
        assert one.server._membership.shard_queue.queue.state() == before
    assert dealt(one.workers[0], 1) == (0, 16)


@pytest.mark.parametrize("how", ["leaves", "fails", "is lost"])
def test_what_another_is_dealt_while_a_worker_goes_is_known_too(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path / "kept", plan("async", lost_worker="go_on"))
    server, (first, second) = lives.server, lives.workers
    dealt(second)
    dealt(second, 1)
    told: list[Any] = []
    settle = server._log.wait_on_disk

    def ask_first() -> None:
        if not told:
            told.append(None)
            told.append(dealt(first))
        settle()

    monkeypatch.setattr(server._log, "wait_on_disk", ask_first)
    if how == "is lost":
        second.hang_up()
        server._membership._look()
    else:
        second.say(m.Leave("an error" if how == "fails" else ""))
    assert told[1] == (0, 16)
    with server._changed:
        before = server._membership.shard_queue.queue.state()
    lives.die(back=[0])
    with lives.server._changed:
        assert lives.server._membership.shard_queue.queue.state() == before
    lives.end()


def test_other_workers_begin_anew(tmp_path: Path) -> None:
    lives = Lives(tmp_path, plan("async", workers=1))
    dealt(lives.workers[0])
    lives.workers[0].say(m.Leave("an error"))
    lives.server.close()
    server = closed_server(1)
    open_up(server, plan("async", workers=1), Durable(tmp_path, job="another", resume=True))
    assert dealt(Worker(server, 0, 1)) == (0, 16)
    server.close()


WORDS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 3)),
    st.tuples(st.just("reach"), st.integers(0, 1), st.booleans()),
    st.tuples(st.sampled_from(["die", "snapshot"])),
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(WORDS, max_size=15))
def test_whatever_happens_the_next_life_knows_the_same(
    tmp_path_factory: pytest.TempPathFactory, words: list[Any]
) -> None:
    one = Lives(tmp_path_factory.mktemp("kept"), plan("async"))
    had = [0, 0]
    for name, *arguments in words:
        if name == "ask":
            who, number = arguments
            told = dealt(one.workers[who], min(number, had[who]), batches=1 + number)
            had[who] += told not in (None, (0, 0)) and number >= had[who]
        elif name == "reach":
            who, gives_back = arguments
            place = max(0, had[who] - 1), 0
            one.workers[who].say(m.LeaseProgress(0, 1, place, gives_back))
        elif name == "snapshot":
            assert one.durability.snapshot()
        else:
            before = one.server._membership.shard_queue.queue.state()
            one.die()
            assert one.server._membership.shard_queue.queue.state().turns == before.turns
    one.end()
