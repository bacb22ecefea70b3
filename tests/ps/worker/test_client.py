# SPDX-License-Identifier: Apache-2.0
"""A client and its servers."""

import mmap
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.errors import refuses
from tests.kernels.batches import numbers
from tests.ps.serving import DIM, OPTIONS, plan
from tests.ps.transport.doubles import LIMIT_S, PULL, scripted
from tests.ps.worker.in_process_job import InProcessJob

from fleetlight.errors import GradientError, PeerLostError, PlanError, ProtocolError
from fleetlight.kernels import dedup
from fleetlight.ps import messages as m
from fleetlight.ps.dtypes import flat_array
from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import BF16, FP32, DensePlan, Plan
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.frames import Frames
from fleetlight.ps.transport.interface import ReceivedReply, RetryPolicy
from fleetlight.ps.transport.memory.body_slots import BodySlots, file_bytes
from fleetlight.ps.transport.protocol import _laid_out, _places, _spec, views
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.wire_forms import FP16, INT8
from fleetlight.ps.worker import client
from fleetlight.ps.worker.client import Client, Wanted
from fleetlight.ps.worker.connections import IncarnationFence
from fleetlight.ps.worker.joint_reads import Read, read_together
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.push_request import PushRequest, check_differences, checked, packed
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal
from fleetlight.ps.worker.reply_values import ReplyValues
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal

# Client: which servers receive a request, and how their replies are combined.


#: of two servers, 0 owns the first and 1 the second
OWNED = dedup(np.arange(40), 2)
ZERO, ONE = (int(OWNED.ids[OWNED.starts[s]]) for s in (0, 1))


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: rows.astype(np.float64)])
def test_a_reply_with_misshapen_rows_is_refused(change: Callable[[Any], Any]) -> None:
    """The code that reads them trusts their shape."""
    job = InProcessJob(1)
    job.first_values(1, 2)
    [channel] = job.lanes["pull"]
    receive = channel.receive
    channel.receive = lambda d=None: ReceivedReply(  # type: ignore[method-assign]
        (reply := receive(d)).message, [change(rows) for rows in reply.arrays]
    )
    with pytest.raises(PlanError, match=r"reply of server 0: the rows of table 'users' are float"):
        job.first_values(1, 2)


def test_a_reply_without_rows_is_refused() -> None:
    job = InProcessJob(2, mode="geo", k_steps=1)
    request = job.push_request(list(range(20)), value=2.0)
    job.client.exchange(request.tables, {}, step=1)
    for channel in job.lanes["push"]:
        receive = channel.receive
        channel.receive = lambda d=None, w=receive: ReceivedReply(w(d).message, [])  # type: ignore[method-assign,misc]
    with pytest.raises(ProtocolError, match="0 arrays, the rows of table 'users' are missing"):
        job.client.exchange(request.tables, {}, step=2)


def test_rows_of_several_servers_are_returned_in_order() -> None:
    job = InProcessJob(3)
    ids = list(range(12))
    values = np.arange(12, dtype=np.float32)
    distinct = dedup(np.array(ids), 3)
    part = TableGradients(
        distinct.ids, distinct.starts, -np.repeat(values[distinct.ids][:, None], DIM, 1)
    )
    request = job.client.build_push(Update(0, 0, OPTIONS, {0: part}, {}), job.live)
    job.client.push(request, phase=0)
    assert job.first_values(*reversed(ids), 3, 3) == [*reversed(values.tolist()), 3.0, 3.0]


def test_a_pull_asks_only_servers_that_own_rows() -> None:
    job = InProcessJob(2)
    [dense_server] = [s for s in (0, 1) if job.client.placement.blocks_of(s)]
    job.receivers(m.Pull)
    job.first_values(ZERO)
    assert job.receivers(m.Pull) == [0]
    job.first_values(ONE, ZERO)
    assert job.receivers(m.Pull) == [0, 1]
    [rows] = job.client.pull([job.wanted()]).rows
    assert rows.shape == (0, DIM)
    assert job.receivers(m.Pull) == []
    values = job.client.pull([], dense=True)
    assert list(values.dense) == job.receivers(m.Pull) == [dense_server]


def test_a_push_goes_to_all_servers() -> None:
    job = InProcessJob(2)
    job.receivers(m.Push)
    job.client.push(job.push_request([ZERO]), phase=0)
    assert job.receivers(m.Push) == [0, 1]
    assert job.first_values(ZERO) == [1.0]


def test_one_request_pulls_two_tables() -> None:
    job = InProcessJob(1)
    job.client.push(job.push_request([1, 2]), phase=0)
    job.receivers(m.Pull)
    values = job.client.pull([job.wanted(2, 1), job.wanted(7, table=1)], dense=True)
    assert [rows[:, 0].tolist() for rows in values.rows] == [[1.0, 1.0], [0.0]]
    assert [array.tolist() for array in values.dense[0]] == [[1.0, 1.0, 1.0]]
    assert job.receivers(m.Pull) == [0]


def test_dense_values_are_packed_and_unpacked() -> None:
    dense = [DensePlan(f"p{n}", (n + 1,), "float32", 0, 0) for n in range(4)]
    job = InProcessJob(2, mode="sync", dense=dense)
    gradients = {n: np.full(n + 1, float(n), np.float32) for n in range(3)}
    update = Update(0, 0, OPTIONS, {}, {**gradients, 3: None})
    request = job.client.build_push(update, job.live)
    gradients[1][:] = 99  # the packed values are a copy
    assert request.absent == [3]
    values = job.client.push(request, phase=0)
    job.live._parameters[1].add_(1)
    assert job.live.written() == [1]
    job.client.unpack(values, job.live)
    assert job.live.written() == []  # all are the servers' values now
    assert [job.live.flat(n).tolist() for n in range(4)] == [
        [1.0], [0.0, 0.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0],
    ]  # fmt: skip


def test_worker_0_sends_the_initial_values() -> None:
    job = InProcessJob(2)
    ids = np.arange(6)
    rows = np.repeat(10.0 + ids[:, None], DIM, 1).astype(np.float32)
    job.live.flat(0)[:] = 7
    job.client.fill({1: (ids, rows)}, job.live)
    assert job.first_values(*range(6), table=1) == [10, 11, 12, 13, 14, 15]
    [dense] = [d for arrays in job.client.pull([], dense=True).dense.values() for d in arrays]
    assert dense.tolist() == [7, 7, 7]


def table_0(values: ReplyValues) -> list[float]:
    """The rows of table 0 in the reply of an exchange, in the order of the ids."""
    parts = sorted((span.start, rows) for table, span, rows in values.pieces if table == 0)
    return [float(row[0]) for _, rows in parts for row in rows]


def test_an_exchange_adds_differences_and_returns_rows() -> None:
    job = InProcessJob(2, mode="geo", k_steps=1)
    request = job.push_request([ZERO, ONE, ONE], value=2.0)
    blocks = {s: job.client.placement.blocks_of(s) for s in (0, 1)}
    ones = {s: [np.ones(b.size, np.float32) for b in mine] for s, mine in blocks.items() if mine}
    values = job.client.exchange(request.tables, ones, step=1)
    assert table_0(values) == [2.0, 2.0]
    assert [a.tolist() for arrays in values.dense.values() for a in arrays] == [[2.0, 2.0, 2.0]]
    assert job.client.exchange(request.tables, {}, step=1, wants=False).pieces == []
    assert job.first_values(ZERO, ONE) == [4.0, 4.0]


@pytest.mark.parametrize("servers", [1, 2])
def test_differences_in_chunks_are_one_exchange(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", 3 * (8 + 4 * DIM))
    job = InProcessJob(servers, mode="geo", k_steps=1)
    request = job.push_request(list(range(20)), value=2.0)
    blocks = {s: job.client.placement.blocks_of(s) for s in range(servers)}
    ones = {s: [np.ones(b.size, np.float32) for b in mine] for s, mine in blocks.items() if mine}
    values = job.client.exchange(request.tables, ones, step=1)
    receivers = len(job.receivers(m.GeoExchange))
    # with one server there is nothing to overlap
    assert receivers == 1 if servers == 1 else receivers >= 20 / 3
    assert table_0(values) == [2.0] * 20
    assert [a.tolist() for arrays in values.dense.values() for a in arrays] == [[2.0, 2.0, 2.0]]
    assert job.first_values(*range(20)) == [2.0] * 20
    assert values.versions == dict.fromkeys(range(servers), 1)


def test_one_server_replies_while_the_next_receives_its_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", 2 * (8 + 4 * DIM))
    job = InProcessJob(2, mode="geo", k_steps=1)
    request = job.push_request(
        [*OWNED.ids[OWNED.slice_of(0)][:4], *OWNED.ids[OWNED.slice_of(1)][:2]]
    )
    job.client.open_lane("push")
    events: list[str] = []
    for channel in job.lanes["push"]:
        channel.events = events
    job.client.exchange(request.tables, {}, step=1)
    assert events == [
        *("send 0", "expect 0", "send 1", "receive 0"),
        *("expect 1", "send 0", "receive 1", "receive 0"),
    ]


@pytest.mark.parametrize("fails_in", ["send", "receive"])
def test_a_failed_chunk_leaves_no_reply_unread(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", 8 + 4 * DIM)
    job = InProcessJob(2, mode="geo", k_steps=1)
    request = job.push_request(list(range(20)), value=2.0)
    job.client.exchange(request.tables, {}, step=1)
    channels = job.lanes["push"]
    channels[1].fails_in = fails_in
    with pytest.raises(PeerLostError, match="server 1"):
        job.client.exchange(request.tables, {}, step=2)
    channels[1].fails_in = None
    job.client.exchange(request.tables, {}, step=3)


@pytest.mark.parametrize("fails_in", ["send", "receive"])
def test_an_error_is_raised_after_all_replies_are_received(fails_in: str) -> None:
    job = InProcessJob(3)
    job.first_values(*range(20))
    channels = job.lanes["pull"]
    channels[1].fails_in = fails_in
    with pytest.raises(PeerLostError, match="server 1"):
        job.first_values(*range(20))
    channels[1].fails_in = None
    # a channel with an unread reply would refuse the next request
    assert job.first_values(*range(20)) == [0.0] * 20


def test_leave_reaches_the_other_servers_if_some_are_unreachable() -> None:
    job = InProcessJob(3)
    job.first_values(*range(20))
    for failed in (0, 1):
        job.lanes["control"][failed].fails_in = "send"
    job.receivers(m.Leave)
    with pytest.raises(PeerLostError, match="server 0"):
        job.client.leave()
    assert job.receivers(m.Leave) == [2]


def test_a_different_plan_is_refused() -> None:
    job = InProcessJob(2)
    other = Plan(**{f: getattr(job.plan, f) for f in job.plan.__struct_fields__} | {"seed": 5})
    with pytest.raises(PlanError, match=r"plan\.seed: 0 here, 5 there"):
        job.client.join(other)
    with pytest.raises(PlanError, match="for 1 workers and 1 servers, the job has 1 and 2"):
        job.client.join(plan("async", 1))


def test_a_heartbeat_does_not_wait_for_the_control_lane() -> None:
    """Otherwise a server would miss the heartbeats of a worker that waits at another server."""
    job = InProcessJob(2)
    job.receivers(m.Heartbeat)
    with job.client._lane_lock("control"):
        heartbeat = threading.Thread(target=job.client.heartbeat, args=(1,))
        heartbeat.start()
        heartbeat.join(20)
        assert not heartbeat.is_alive()
    assert job.receivers(m.Heartbeat) == [0, 1]


@pytest.mark.parametrize("broken", [None, "control", "beat"])
def test_a_failure_report_uses_a_free_unbroken_lane(broken: str | None) -> None:
    job = InProcessJob(2)
    job.client.heartbeat(1)
    job.receivers(m.Leave)
    if broken is not None:
        job.lanes[broken][0].fails_in = "send"
    if broken == "beat":
        job.client.report_failure("an error")
    else:
        with job.client._lane_lock("control"):
            job.client.report_failure("an error")
    # each server receives it once
    assert sorted(job.receivers(m.Leave)) == [0, 1]


def test_a_closed_client_opens_no_lane() -> None:
    job = InProcessJob(1)
    job.client.heartbeat(1)
    job.client.close()
    with pytest.raises(PeerLostError, match="worker 0 has disconnected"):
        job.client.heartbeat(2)
    with pytest.raises(PeerLostError, match="worker 0 has disconnected"):
        job.first_values(1)
    assert "pull" not in job.lanes


def test_a_lane_opened_during_close_is_closed_too() -> None:
    job = InProcessJob(1)
    connect = job.client._connect

    def connect_and_close(lane: str) -> Sequence[Any]:
        channels = connect(lane)
        job.client.close()
        return channels

    job.client._connect = connect_and_close
    with pytest.raises(PeerLostError, match="has disconnected"):
        job.first_values(1)
    assert job.lanes["pull"][0].closed


def test_a_refused_step_is_applied_on_no_server() -> None:
    job = InProcessJob(2, mode="sync")
    request = job.push_request([ZERO, ONE])
    request.tables[0].gradients[-1] = np.nan
    update = Update(0, 0, OPTIONS, request.tables, {0: np.ones(3, np.float32)})
    job.receivers(m.Push)
    with pytest.raises(GradientError, match="table 'users'"):
        job.client.push(job.client.build_push(update, job.live), phase=0)
    assert job.first_values(ZERO, ONE) == [0.0, 0.0]


@pytest.mark.parametrize("end", [Client.leave, lambda client: client.report_failure("an error")])
def test_leaving_closes_all_lanes(end: Callable[[Client], None]) -> None:
    job = InProcessJob(2)
    job.first_values(1)
    end(job.client)
    assert job.receivers(m.Leave) == [0, 1]
    assert all(channel.closed for channels in job.lanes.values() for channel in channels)
    job.client.close()


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_async_and_geo_replies_carry_the_stop_signal(mode: str) -> None:
    job = InProcessJob(1, mode=mode)

    def push_step(step: int) -> ControlSignal:
        if mode == "geo":
            job.client.exchange(job.push_request([ZERO]).tables, {}, step=step)
        else:
            job.client.push(job.push_request([ZERO], step=step), phase=0)
        return job.client.signals.received

    assert push_step(0) == ControlSignal()
    job.servers[0].call_stop()
    assert push_step(1) == ControlSignal(stop=True)


def test_a_restarted_worker_receives_earlier_signals(tmp_path: Path) -> None:
    """The signals of the repeated step, and those that its predecessor received before it."""
    identity = WorkerIdentity(0, 1, 2, job="j", start=0, started_at=1)
    first = WorkerJournal(tmp_path, identity)
    job = InProcessJob(mode="sync", journal=first)

    def send_signal(server: int, call: ControlSignal) -> None:
        job.client.open_lane("beat")
        job.lanes["beat"][server].send(m.Heartbeat(0, call))
        job.lanes["beat"][server].receive()

    def request_of(step: int) -> PushRequest:
        request = job.push_request([ZERO, ONE], step=step)
        request.origin = StepOrigin(0, 0, 0, ResumePoint(0, 0, 0, b""))
        return request

    send_signal(0, ControlSignal(saves=1))
    job.client.push(request_of(0), phase=0)
    assert job.client.signals.from_steps == ControlSignal(saves=1)
    # a restarted server does not know which signals it sent
    job.servers[0]._presence._called = NO_SIGNAL
    send_signal(1, ControlSignal(stop=True))
    last = request_of(1)
    job.client.push(last, phase=0, hold=True)
    assert job.client.signals.from_steps == ControlSignal(saves=1)
    job.client.apply(last, phase=0, factor=0.5)
    assert job.client.signals.from_steps == ControlSignal(stop=True, saves=1)
    first.close(is_needed=True)
    second = WorkerJournal(tmp_path, identity)
    later = Client(0, 1, 2, job.connect, second)
    assert second.last is not None
    assert later.repeat(second.last)
    assert later.signals.from_steps == ControlSignal(stop=True, saves=1)
    second.close(is_needed=False)


def test_acknowledged_requests_are_counted_for_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = InProcessJob(2, mode="sync")
    sync.client.push(sync.push_request([ZERO], dense=np.ones(3)), phase=0, hold=True)
    # held gradients are not applied yet: the worker repeats them to a server that lost them
    assert sync.client.acknowledged == [0, 0]
    sync.client.apply(sync.push_request([ZERO], dense=np.ones(3)), phase=0, factor=0.5)
    assert sync.client.acknowledged == [2, 2]
    monkeypatch.setattr(client, "CHUNK_BYTES", 8 + 4 * DIM)
    geo = InProcessJob(2, mode="geo", k_steps=1)
    geo.lanes.clear()
    tables = geo.push_request([*OWNED.ids[OWNED.slice_of(0)][:4], ONE]).tables
    geo.client.open_lane("push")
    geo.lanes["push"][1].fails_in = "receive"
    with pytest.raises(PeerLostError):
        geo.client.exchange(tables, {}, step=1)
    # each chunk counts
    assert geo.client.acknowledged[0] >= 1
    assert geo.client.acknowledged[1] == 0


def test_a_restarted_worker_knows_what_was_acknowledged(tmp_path: Path) -> None:
    identity = WorkerIdentity(0, 1, 2, job="j", start=0, started_at=1)
    first = WorkerJournal(tmp_path, identity)
    job = InProcessJob(journal=first)
    for _ in range(2):
        request = job.push_request([ZERO, ONE])
        request.origin = StepOrigin(0, 0, 0, ResumePoint(0, 0, 0, b""))
        job.client.push(request, phase=0)
    first.close(is_needed=True)
    second = WorkerJournal(tmp_path, identity)
    # the journal does not tell whether the second push was applied, so it is repeated
    later = Client(0, 1, 2, job.connect, second)
    assert later.acknowledged == [1, 1]
    # a restarted script: the servers forget its pushes
    later.restart_script()
    assert later.acknowledged == [0, 0]
    second.close(is_needed=False)


# IncarnationFence: a client of a restarted server never returns to its predecessor.


def test_an_earlier_incarnation_of_a_server_is_refused() -> None:
    fence = IncarnationFence()
    for incarnation in (1, 3, 3):
        fence.check(m.Welcome(0, 0, incarnation))
    with refuses(PeerLostError, "server 0 replies as incarnation 2", "incarnation 3 has"):
        fence.check(m.Welcome(0, 0, 2))
    # each server has its own incarnations, and one that is not open yet reports 0
    fence.check(m.Welcome(1, 0, 1))
    fence.check(m.Welcome(0, 0, 0))


def test_a_repaired_connection_is_to_the_newest_incarnation() -> None:
    served: list[int] = []

    def incarnation(number: int, *, replies: bool) -> Callable[[socket.socket, Frames], None]:
        def act(raw: socket.socket, frames: Frames) -> None:
            hello = frames.receive("a greeting")
            assert hello is not None
            frames.send(hello.request, m.Welcome(0, 0, number), [], "a welcome")
            request = frames.receive("a request")
            if request is not None:
                served.append(number)
            if request is not None and replies:
                frames.send(request.request, m.Pulled(1, 1), [], "a reply")

        return act

    acts = [
        incarnation(2, replies=False),
        incarnation(1, replies=True),
        incarnation(2, replies=True),
    ]
    with scripted(*acts) as address:
        channel = SocketChannel(
            lambda: address,
            "server 0",
            deadline_s=LIMIT_S,
            greeting=lambda: m.Heartbeat(0),
            retry=RetryPolicy(LIMIT_S, restarts=True),
            check=IncarnationFence().check,
        )
        connect_all([channel], LIMIT_S)
        assert channel.call(PULL).message == m.Pulled(1, 1)
        channel.close()
    assert served == [2, 2]


# Reads of several tables fetch their missing rows together.


WANTED = [Wanted(table, dedup(np.array([table, 9])), True) for table in (3, 1, 2)]


class Reads:
    """Tables without rows; table 1 has all rows. Counts reads that have not ended."""

    def __init__(self) -> None:
        self.open = 0
        self.fetched: list[list[int]] = []

    def read(self, wanted: Wanted) -> Read:
        self.open += 1
        try:
            if wanted.table == 1:
                return np.zeros((2, 1), np.float32)
            return (yield wanted.ids) * 10
        finally:
            self.open -= 1

    def fetch(self, missing: Sequence[Wanted]) -> Any:
        assert self.open == len(missing)
        self.fetched.append([one.table for one in missing])
        return [one.ids.ids[:, None].astype(np.float32) for one in missing]


def test_missing_rows_of_all_tables_are_fetched_once() -> None:
    reads = Reads()
    rows = read_together(WANTED, reads.read, reads.fetch)
    assert [one[:, 0].tolist() for one in rows] == [[30, 90], [0, 0], [20, 90]]
    assert reads.fetched == [[3, 2]]
    read_together(WANTED[1:2], reads.read, reads.fetch)
    assert (reads.fetched, reads.open) == ([[3, 2]], 0)


def test_a_failed_fetch_ends_all_reads() -> None:
    reads = Reads()

    def fail(missing: Any) -> Any:
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError, match="lost"):
        read_together(WANTED, reads.read, fail)
    assert reads.open == 0


# Dense gradients of a push are written at their place in a slot, behind the arrays of tables.


SLOT = 256 << 10
DENSE = 9001


def job_with(wire: str) -> InProcessJob:
    tables = [msgspec.structs.replace(table, wire=wire) for table in plan().tables]
    dense = [
        DensePlan("weight", (DENSE,), "float32", 0, 0),
        DensePlan("bias", (DENSE,), "bfloat16", 0, 0),
    ]
    job = InProcessJob(2, tables=tables, dense=dense)
    job.live = LocalParameters([torch.ones(DENSE), torch.ones(DENSE, dtype=torch.bfloat16)])
    return job


def part_of(ids: Any, counted: bool) -> TableGradients:
    distinct = dedup(ids, 2)
    count = len(distinct.ids)
    counts = np.ones(count, np.float32) if counted else None
    gradients = numbers(count, count, DIM)
    return TableGradients(distinct.ids, distinct.starts, gradients, counts, counts)


def update_of(tables: dict[int, TableGradients]) -> Update:
    dense: dict[int, Any] = {
        0: np.arange(DENSE, dtype=np.float32),
        1: np.arange(DENSE, dtype=np.uint16),
    }
    return Update(0, 0, OPTIONS, tables, dense)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("wire", [FP32, BF16, FP16, INT8])
@pytest.mark.parametrize("counts", [(), (0,), (41,), (3, 1000), (1, 0)])
def test_dense_gradients_are_written_at_their_place(
    counts: tuple[int, ...], wire: str, counted: bool
) -> None:
    job = job_with(wire)
    tables = {n: part_of(np.arange(count), counted) for n, count in enumerate(counts)}
    memories = [mmap.mmap(-1, file_bytes(SLOT)) for _ in range(2)]
    slots = [BodySlots(memory, SLOT, is_client=True) for memory in memories]
    for server, channel in enumerate(job.client.open_lane("push")):
        channel.output = slots[server].output  # type: ignore[method-assign]
    update = update_of(tables)
    memory = job.client.push_memory(update)
    push = job.client.build_push(update, job.live, memory=memory)
    plain = job.client.build_push(update, job.live)
    requests = job.client._push_requests(push, phase=0)
    expected = job.client._push_requests(plain, phase=0)
    for server, (_, arrays) in requests.items():
        parts, size = _laid_out(arrays)
        # 0 if an array in the slot is not at its place
        number = slots[server].fill(parts, size)
        assert number > 0, f"{size} bytes"
        for block in push.blocks[server]:
            assert np.may_share_memory(block, slots[server]._outgoing[number - 1])
        places, _ = _places(_spec(n, array) for n, array in enumerate(arrays))
        received = BodySlots(memories[server], SLOT, is_client=False).take(number, size)
        for array, other in zip(views(places, received), expected[server][1], strict=True):
            np.testing.assert_array_equal(array, other)


def test_a_server_without_dense_blocks_gives_no_memory_early() -> None:
    """Arrays of tables are copied in any case, and checking their places takes time."""
    job = InProcessJob(2)
    slots = [BodySlots(mmap.mmap(-1, file_bytes(SLOT)), SLOT, is_client=True) for _ in range(2)]
    for server, channel in enumerate(job.client.open_lane("push")):
        channel.output = slots[server].output  # type: ignore[method-assign]
    job.client.push_memory(Update(0, 0, OPTIONS, {0: part_of(np.arange(9), False)}, {}))
    is_dense = [bool(job.client.placement.blocks_of(server)) for server in range(2)]
    assert sorted(is_dense) == [False, True]
    assert [one._begun is not None for one in slots] == is_dense


# PushRequest: an update is packed and checked before any of it is sent.


NAN = [0.0, np.nan, 0.0]


def request_of(
    row: float, dense: list[float], mode: str = "sync", dtype: str = "float32", **facts: Any
) -> PushRequest:
    """A push request of worker 1 whose last row of many is `row`."""
    known = [DensePlan("bias", (3,), dtype, 0, 0)]
    the_plan = plan(mode, server_num=2, dense=known, **facts)
    placement = Placement(the_plan)
    ids = dedup(np.arange(40), 2)
    gradients = np.ones((40, DIM), np.float32)
    gradients[-1] = row
    values = torch.tensor(dense).to(getattr(torch, dtype))
    tables = {0: TableGradients(ids.ids, ids.starts, gradients)}
    update = Update(0, 7, OPTIONS, tables, {0: flat_array(values)})
    live = LocalParameters([torch.ones(3, dtype=getattr(torch, dtype))])
    return checked(packed(update, the_plan, placement, live), the_plan, placement, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("row", "dense", "where"),
    [(np.inf, [0.0] * 3, "table 'users'"), (1.0, NAN, "parameter 'bias'")],
)
def test_nonfinite_gradients_are_sent_to_no_server(
    row: float, dense: list[float], where: str, dtype: str
) -> None:
    with pytest.raises(GradientError, match=rf"worker 1 computed a gradient \(step 7\) of {where}"):
        request_of(row, dense, "async", dtype)
    refused = request_of(row, dense, dtype=dtype)
    assert where in refused.refusal
    assert not refused.skip
    skipped = request_of(row, dense, "async", dtype, on_nonfinite="skip")
    assert (skipped.skip, skipped.refusal) == (True, "")
    for empty in (refused, skipped):
        assert (empty.tables, empty.blocks, empty.step) == ({}, {}, 7)
    applied = request_of(row, dense, dtype=dtype, on_nonfinite="apply")
    assert (applied.skip, applied.refusal, list(applied.tables)) == (False, "", [0])


def test_finite_gradients_are_sent_whole() -> None:
    """Also if their sum would be infinite."""
    large = request_of(3e38, [3e38] * 3)
    assert (large.skip, large.refusal, list(large.tables)) == (False, "", [0])
    assert [array.tolist() for mine in large.blocks.values() for array in mine] == [
        np.full(3, 3e38, np.float32).tolist()
    ]


@pytest.mark.parametrize(
    ("row", "dense", "where"),
    [(np.inf, [0.0] * 3, "table 'users'"), (1.0, NAN, "parameter 'bias'")],
)
def test_nonfinite_differences_are_refused_as_a_whole(
    row: float, dense: list[float], where: str
) -> None:
    known = [DensePlan("bias", (3,), "float32", 0, 0)]
    ids = dedup(np.arange(40), 2)
    learned = np.ones((40, DIM), np.float32)
    learned[-1] = row
    tables = {0: TableGradients(ids.ids, ids.starts, learned)}
    for policy in ("refuse", "skip", "apply"):
        the_plan = plan("geo", server_num=2, dense=known, k_steps=2, on_nonfinite=policy)
        placement = Placement(the_plan)
        blocks = {s: [np.array(dense, np.float32)] for s in (0, 1) if placement.blocks_of(s)}
        if policy == "apply":
            check_differences(tables, blocks, 3, the_plan, placement, 1)
            continue
        with pytest.raises(GradientError, match=rf"difference \(step 3\) of {where}"):
            check_differences(tables, blocks, 3, the_plan, placement, 1)
