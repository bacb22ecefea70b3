# SPDX-License-Identifier: Apache-2.0
"""One worker's view of all servers: what goes to whom, and how answers become one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.serving import DIM, OPTIONS, plan
from tests.ps.worker.team import Team

from fleetlight.errors import GradientError, PeerLostError, PlanError, ProtocolError
from fleetlight.kernels import dedup
from fleetlight.ps import messages as m
from fleetlight.ps.plan import DensePlan, Plan
from fleetlight.ps.transport.interface import ReceivedReply
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.worker import client
from fleetlight.ps.worker.client import Client, ReplyValues
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal

#: of two servers, 0 owns the first and 1 the second
OWNED = dedup(np.arange(40), 2)
ZERO, ONE = (int(OWNED.ids[OWNED.starts[s]]) for s in (0, 1))


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: rows.astype(np.float64)])
def test_rows_that_do_not_fit_are_refused(change: Callable[[Any], Any]) -> None:
    """What reads them trusts their shape."""
    team = Team(1)
    team.first(1, 2)
    [spy] = team.lanes["pull"]
    whole = spy.receive
    spy.receive = lambda d=None: ReceivedReply(  # type: ignore[method-assign]
        (found := whole(d)).message, [change(rows) for rows in found.arrays]
    )
    with pytest.raises(PlanError, match=r"reply of server 0: the rows of table 'users' are float"):
        team.first(1, 2)


def test_rows_that_are_missing_are_refused() -> None:
    team = Team(2, mode="geo", k_steps=1)
    parcel = team.parcel(list(range(20)), value=2.0)
    team.client.exchange(parcel.tables, {}, step=1)
    for spy in team.lanes["push"]:
        whole = spy.receive
        spy.receive = lambda d=None, w=whole: ReceivedReply(w(d).message, [])  # type: ignore[method-assign,misc]
    with pytest.raises(ProtocolError, match="0 arrays, the rows of table 'users' are missing"):
        team.client.exchange(parcel.tables, {}, step=2)


def test_rows_of_several_servers_come_back_in_order() -> None:
    team = Team(3)
    ids = list(range(12))
    values = np.arange(12, dtype=np.float32)
    distinct = dedup(np.array(ids), 3)
    part = TableGradients(
        distinct.ids, distinct.starts, -np.repeat(values[distinct.ids][:, None], DIM, 1)
    )
    parcel = team.client.build_push(Update(0, 0, OPTIONS, {0: part}, {}), team.live)
    team.client.push(parcel, phase=0)
    assert team.first(*reversed(ids), 3, 3) == [*reversed(values.tolist()), 3.0, 3.0]


def test_only_those_are_asked_who_have_something() -> None:
    team = Team(2)
    [home] = [s for s in (0, 1) if team.client.placement.blocks_of(s)]
    team.said(m.Pull)
    team.first(ZERO)
    assert team.said(m.Pull) == [0]
    team.first(ONE, ZERO)
    assert team.said(m.Pull) == [0, 1]
    [rows] = team.client.pull([team.wanted()]).rows
    assert rows.shape == (0, DIM)
    assert team.said(m.Pull) == []
    values = team.client.pull([], dense=True)
    assert list(values.dense) == team.said(m.Pull) == [home]


def test_a_push_goes_to_all_or_to_those_it_concerns() -> None:
    team = Team(2)
    team.said(m.Push)
    team.client.push(team.parcel([ZERO]), phase=0)
    assert team.said(m.Push) == [0, 1]
    alone = team.parcel([ONE])
    alone.blocks = {}
    team.client.push(alone, phase=0, everywhere=False)
    sequences = [message.sequence for _, message in team.log if isinstance(message, m.Push)]
    assert team.said(m.Push) == [1]
    assert sequences == [2]  # counted for each server
    assert team.first(ZERO, ONE) == [1.0, 1.0]


def test_two_tables_travel_in_one_request() -> None:
    team = Team(1)
    team.client.push(team.parcel([1, 2]), phase=0)
    team.said(m.Pull)
    values = team.client.pull([team.wanted(2, 1), team.wanted(7, table=1)], dense=True)
    assert [rows[:, 0].tolist() for rows in values.rows] == [[1.0, 1.0], [0.0]]
    assert [array.tolist() for array in values.dense[0]] == [[1.0, 1.0, 1.0]]
    assert team.said(m.Pull) == [0]


def test_dense_values_are_packed_and_unpacked() -> None:
    dense = [DensePlan(f"p{n}", (n + 1,), "float32", 0, 0) for n in range(4)]
    team = Team(2, mode="sync", dense=dense)
    gradients = {n: np.full(n + 1, float(n), np.float32) for n in range(3)}
    update = Update(0, 0, OPTIONS, {}, {**gradients, 3: None})
    parcel = team.client.build_push(update, team.live)
    gradients[1][:] = 99  # what was packed is no longer the user's
    assert parcel.absent == [3]
    values = team.client.push(parcel, phase=0)
    team.live._parameters[1].add_(1)
    assert team.live.written() == [1]
    team.client.unpack(values, team.live)
    assert team.live.written() == []  # all are the servers' values now
    assert [team.live.flat(n).tolist() for n in range(4)] == [
        [1.0], [0.0, 0.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0],
    ]  # fmt: skip


def test_the_first_values_are_brought_by_worker_0() -> None:
    team = Team(2)
    ids = np.arange(6)
    rows = np.repeat(10.0 + ids[:, None], DIM, 1).astype(np.float32)
    team.live.flat(0)[:] = 7
    team.client.fill({1: (ids, rows)}, team.live)
    assert team.first(*range(6), table=1) == [10, 11, 12, 13, 14, 15]
    [dense] = [d for arrays in team.client.pull([], dense=True).dense.values() for d in arrays]
    assert dense.tolist() == [7, 7, 7]


def arrived(values: ReplyValues) -> list[float]:
    """What an exchange has brought of table 0, in the order of the ids."""
    pieces = sorted((span.start, rows) for table, span, rows in values.pieces if table == 0)
    return [float(row[0]) for _, rows in pieces for row in rows]


def test_differences_are_exchanged() -> None:
    team = Team(2, mode="geo", k_steps=1)
    parcel = team.parcel([ZERO, ONE, ONE], value=2.0)
    blocks = {s: team.client.placement.blocks_of(s) for s in (0, 1)}
    ones = {s: [np.ones(b.size, np.float32) for b in mine] for s, mine in blocks.items() if mine}
    values = team.client.exchange(parcel.tables, ones, step=1)
    assert arrived(values) == [2.0, 2.0]
    assert [a.tolist() for arrays in values.dense.values() for a in arrays] == [[2.0, 2.0, 2.0]]
    silent = team.client.exchange(parcel.tables, {}, step=1, wants=False)
    assert silent.pieces == []
    assert team.first(ZERO, ONE) == [4.0, 4.0]


@pytest.mark.parametrize("servers", [1, 2])
def test_differences_in_pieces_are_one_exchange(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", 3 * (8 + 4 * DIM))
    team = Team(servers, mode="geo", k_steps=1)
    parcel = team.parcel(list(range(20)), value=2.0)
    blocks = {s: team.client.placement.blocks_of(s) for s in range(servers)}
    ones = {s: [np.ones(b.size, np.float32) for b in mine] for s, mine in blocks.items() if mine}
    values = team.client.exchange(parcel.tables, ones, step=1)
    said = len(team.said(m.GeoExchange))
    # of one server there is nothing to overlap
    assert said == 1 if servers == 1 else said >= 20 / 3
    assert arrived(values) == [2.0] * 20
    assert [a.tolist() for arrays in values.dense.values() for a in arrays] == [[2.0, 2.0, 2.0]]
    assert team.first(*range(20)) == [2.0] * 20
    assert values.versions == dict.fromkeys(range(servers), 1)


def test_one_server_answers_while_the_next_is_sent_its_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", 2 * (8 + 4 * DIM))
    team = Team(2, mode="geo", k_steps=1)
    parcel = team.parcel([*OWNED.ids[OWNED.of_server(0)][:4], *OWNED.ids[OWNED.of_server(1)][:2]])
    team.client.open_lane("push")
    events: list[str] = []
    for spy in team.lanes["push"]:
        spy.events = events
    team.client.exchange(parcel.tables, {}, step=1)
    assert events == [
        *("send 0", "expect 0", "send 1", "receive 0"),
        *("expect 1", "send 0", "receive 1", "receive 0"),
    ]


@pytest.mark.parametrize("fails", ["send", "receive"])
def test_a_piece_that_fails_leaves_no_answer_behind(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", 8 + 4 * DIM)
    team = Team(2, mode="geo", k_steps=1)
    parcel = team.parcel(list(range(20)), value=2.0)
    team.client.exchange(parcel.tables, {}, step=1)
    spies = team.lanes["push"]
    spies[1].fails = fails
    with pytest.raises(PeerLostError, match="server 1"):
        team.client.exchange(parcel.tables, {}, step=2)
    spies[1].fails = None
    team.client.exchange(parcel.tables, {}, step=3)


@pytest.mark.parametrize("fails", ["send", "receive"])
def test_an_error_of_one_server_is_raised_once_nobody_owes_an_answer(fails: str) -> None:
    team = Team(3)
    team.first(*range(20))
    spies = team.lanes["pull"]
    spies[1].fails = fails
    with pytest.raises(PeerLostError, match="server 1"):
        team.first(*range(20))
    spies[1].fails = None
    # a channel with an answer still to be taken would refuse the next request
    assert team.first(*range(20)) == [0.0] * 20


def test_a_server_that_cannot_be_reached_keeps_no_word_from_the_others() -> None:
    team = Team(3)
    team.first(*range(20))
    for dead in (0, 1):
        team.lanes["control"][dead].fails = "send"
    team.said(m.Leave)
    with pytest.raises(PeerLostError, match="server 0"):
        team.client.leave()
    assert team.said(m.Leave) == [2]


def test_plans_that_differ_are_told_apart() -> None:
    team = Team(2)
    other = Plan(**{f: getattr(team.plan, f) for f in team.plan.__struct_fields__} | {"seed": 5})
    with pytest.raises(PlanError, match=r"plan\.seed: 0 here, 5 there"):
        team.client.join(other)
    with pytest.raises(PlanError, match="for 1 workers and 1 servers, the job has 1 and 2"):
        team.client.join(plan("async", 1))


def test_a_sign_of_life_does_not_wait_for_the_control_lane() -> None:
    """Else a server would miss those of a worker that waits at another one."""
    team = Team(2)
    team.said(m.Heartbeat)
    with team.client._lane_lock("control"):
        beat = threading.Thread(target=team.client.heartbeat, args=(1,))
        beat.start()
        beat.join(20)
        assert not beat.is_alive()
    assert team.said(m.Heartbeat) == [0, 1]


@pytest.mark.parametrize("broken", [None, "control", "beat"])
def test_last_words_go_by_a_lane_that_is_free_and_whole(broken: str | None) -> None:
    team = Team(2)
    team.client.heartbeat(1)
    team.said(m.Leave)
    if broken is not None:
        team.lanes[broken][0].fails = "send"
    if broken == "beat":
        team.client.report_failure("an error")
    else:
        with team.client._lane_lock("control"):
            team.client.report_failure("an error")
    # nobody hears it twice
    assert sorted(team.said(m.Leave)) == [0, 1]


def test_a_lane_is_not_opened_again_once_all_are_closed() -> None:
    team = Team(1)
    team.client.heartbeat(1)
    team.client.close()
    with pytest.raises(PeerLostError, match="worker 0 has disconnected"):
        team.client.heartbeat(2)
    with pytest.raises(PeerLostError, match="worker 0 has disconnected"):
        team.first(1)
    assert "pull" not in team.lanes


def test_a_lane_that_is_opened_while_all_are_closed_is_closed_too() -> None:
    team = Team(1)
    connect = team.client._connect

    def slowly(lane: str) -> Sequence[Any]:
        channels = connect(lane)
        team.client.close()
        return channels

    team.client._connect = slowly
    with pytest.raises(PeerLostError, match="has disconnected"):
        team.first(1)
    assert team.lanes["pull"][0].closed


def test_a_step_that_is_refused_is_made_on_no_server() -> None:
    team = Team(2, mode="sync")
    bad = team.parcel([ZERO, ONE])
    bad.tables[0].gradients[-1] = np.nan
    update = Update(0, 0, OPTIONS, bad.tables, {0: np.ones(3, np.float32)})
    team.said(m.Push)
    with pytest.raises(GradientError, match="table 'users'"):
        team.client.push(team.client.build_push(update, team.live), phase=0)
    assert team.first(ZERO, ONE) == [0.0, 0.0]


@pytest.mark.parametrize("end", [Client.leave, lambda client: client.report_failure("an error")])
def test_at_the_end_all_lanes_are_closed(end: Callable[[Client], None]) -> None:
    team = Team(2)
    team.first(1)
    end(team.client)
    assert team.said(m.Leave) == [0, 1]
    assert all(spy.closed for spies in team.lanes.values() for spy in spies)
    team.client.close()


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_who_makes_steps_alone_hears_of_a_stop_with_the_answer(mode: str) -> None:
    team = Team(1, mode=mode)

    def bring(step: int) -> ControlSignal:
        if mode == "geo":
            team.client.exchange(team.parcel([ZERO]).tables, {}, step=step)
        else:
            team.client.push(team.parcel([ZERO], step=step), phase=0)
        return team.client.signals.received

    assert bring(0) == ControlSignal()
    team.servers[0].call_stop()
    assert bring(1) == ControlSignal(stop=True)


def test_a_later_life_hears_what_was_called_for(tmp_path: Path) -> None:
    """Behind the step that it brings again, and what the life before had heard before that."""
    whose = WorkerIdentity(0, 1, 2, job="j", start=0, started_at=1)
    first = WorkerJournal(tmp_path, whose)
    team = Team(mode="sync", journal=first)

    def call_for(server: int, call: ControlSignal) -> None:
        team.client.open_lane("beat")
        team.lanes["beat"][server].send(m.Heartbeat(0, call))
        team.lanes["beat"][server].receive()

    def parcel(step: int) -> PushRequest:
        parcel = team.parcel([ZERO, ONE], step=step)
        parcel.origin = StepOrigin(0, 0, 0, ResumePoint(0, 0, 0, b""))
        return parcel

    call_for(0, ControlSignal(saves=1))
    team.client.push(parcel(0), phase=0)
    assert team.client.signals.of_steps == ControlSignal(saves=1)
    # a server that was started again knows nothing of what it had told
    team.servers[0]._presence._called = NO_SIGNAL
    call_for(1, ControlSignal(stop=True))
    last = parcel(1)
    team.client.push(last, phase=0, hold=True)
    assert team.client.signals.of_steps == ControlSignal(saves=1)
    team.client.apply(last, phase=0, factor=0.5)
    assert team.client.signals.of_steps == ControlSignal(stop=True, saves=1)
    first.close(is_needed=True)
    second = WorkerJournal(tmp_path, whose)
    later = Client(0, 1, 2, team.connect, second)
    assert second.last is not None
    assert later.repeat(second.last)
    assert later.signals.of_steps == ControlSignal(stop=True, saves=1)
    second.close(is_needed=False)


def test_what_was_acknowledged_is_counted_for_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Team(2, mode="sync")
    sync.client.push(sync.parcel([ZERO], dense=np.ones(3)), phase=0, hold=True)
    # held gradients are no part of the values: a server that has lost them is told them again
    assert sync.client.acknowledged == [0, 0]
    sync.client.apply(sync.parcel([ZERO], dense=np.ones(3)), phase=0, factor=0.5)
    assert sync.client.acknowledged == [2, 2]
    monkeypatch.setattr(client, "CHUNK_BYTES", 8 + 4 * DIM)
    geo = Team(2, mode="geo", k_steps=1)
    geo.lanes.clear()
    pieces = geo.parcel([*OWNED.ids[OWNED.of_server(0)][:4], ONE]).tables
    geo.client.open_lane("push")
    geo.lanes["push"][1].fails = "receive"
    with pytest.raises(PeerLostError):
        geo.client.exchange(pieces, {}, step=1)
    # each piece counts by itself
    assert geo.client.acknowledged[0] >= 1
    assert geo.client.acknowledged[1] == 0


def test_a_later_life_knows_what_was_acknowledged(tmp_path: Path) -> None:
    whose = WorkerIdentity(0, 1, 2, job="j", start=0, started_at=1)
    first = WorkerJournal(tmp_path, whose)
    team = Team(journal=first)
    for _ in range(2):
        parcel = team.parcel([ZERO, ONE])
        parcel.origin = StepOrigin(0, 0, 0, ResumePoint(0, 0, 0, b""))
        team.client.push(parcel, phase=0)
    first.close(is_needed=True)
    second = WorkerJournal(tmp_path, whose)
    # whether the second push came through is not known: it is told again
    later = Client(0, 1, 2, team.connect, second)
    assert later.acknowledged == [1, 1]
    # where servers forget what it has pushed
    later.restart_script()
    assert later.acknowledged == [0, 0]
    second.close(is_needed=False)
