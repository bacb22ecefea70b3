# SPDX-License-Identifier: Apache-2.0
"""A server: what it answers, what it answers again, what it refuses, and what it logs."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.chaos.fuzzing.making import any_value
from tests.ps.gates import called
from tests.ps.serving import (
    OPTIONS,
    Worker,
    closed_server,
    hello,
    ids_of,
    of_all,
    open_up,
    opened,
    plan,
    rows_of,
    team,
    together,
)
from tests.ps.transport.doubles import LIMIT_S, raw_client, read_all

from fleetlight.errors import (
    DeadlineError,
    MembershipError,
    PeerLostError,
    PlanError,
    ProtocolError,
)
from fleetlight.ps import messages as m
from fleetlight.ps.changes import PhaseEnded
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.journal.journal import NEVER, Journal, Policy
from fleetlight.ps.plan import BF16, FP32, DensePlan, EntryPlan, Plan
from fleetlight.ps.server import server as server_module
from fleetlight.ps.server.durability.durability import CODEC, Durable
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.transport import Connection, Listener, SocketChannel
from fleetlight.ps.transport.frames import Frames
from fleetlight.ps.wire_forms import FORMS, FP16, INT8, encoded
from fleetlight.roles.role import Endpoint
from fleetlight.roles.secret import Secret
from fleetlight.wire.plain import Wire

# Server: joining, pulls, initial values, and what all modes have in common.


def test_join_waits_for_the_plan_and_compares_it() -> None:
    server = closed_server(1)
    worker = Worker(server, 0, 1)
    the_plan = plan(workers=1)
    joined, _ = together(lambda: worker.say(m.Join(the_plan)), lambda: open_up(server, the_plan))
    assert joined == (m.Welcome(0, 0), [])


def test_a_different_plan_is_refused_with_its_first_difference() -> None:
    server = opened(plan(workers=1))
    wider = msgspec.structs.replace(plan(workers=1).tables[1], dim=16)
    other = msgspec.structs.replace(plan(workers=1), tables=[plan().tables[0], wider])
    with pytest.raises(PlanError, match=r"server 0 .*worker 0 .*items\]\.dim: 2 here, 16 there"):
        Worker(server, 0, 1).say(m.Join(other))


def test_join_times_out() -> None:
    worker = Worker(closed_server(1, deadline_s=0.05), 0, 1)
    with pytest.raises(DeadlineError, match=r"joining waited 0\.05 s for server 0, .*init_server"):
        worker.say(m.Join(plan(workers=1)))


def test_requests_before_greeting_or_join_are_refused() -> None:
    server = closed_server(1)
    with pytest.raises(ProtocolError, match="a stranger sent Heartbeat first, expected Greeting"):
        server(Connection("a stranger"), m.Heartbeat(0), [])
    server.gone(Connection("a stranger"), None)
    worker = Worker(server, 0, 1)
    with pytest.raises(PlanError, match="send Join before"):
        worker.pull(0, [1])
    with pytest.raises(ProtocolError, match="sent Done, which servers only send"):
        worker.say(m.Done())


def test_replies_with_state_wait_for_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened(plan(workers=1))
    worker = Worker(server, 0, 1)
    waited: list[m.Message] = []
    kinds = {
        *(m.Barrier, m.Heartbeat, m.Leave, m.GoodbyeAck, m.MetricsRequest, m.Resume, m.Join),
        *(m.LeaseRequest, m.LeaseProgress, m.RemainingRequest, m.Pull, m.Push, m.Apply),
        *(m.GeoExchange, m.EndPhase, m.Fill, m.Shrink, m.SnapshotRequest, m.Save, m.ReadFile),
        *(m.WriteFile, m.DropSnapshot, m.FetchDense, m.Load, m.RestoreDense),
    }
    monkeypatch.setattr(server, "_handle", lambda *_: (m.Done(), []))
    for kind in kinds:
        monkeypatch.setattr(server._log, "wait_on_disk", lambda kind=kind: waited.append(kind))
        worker.say(any_value(random.Random(1), kind))
    without_state = {
        m.GoodbyeAck,
        m.Heartbeat,
        m.MetricsRequest,
        m.Resume,
        m.Join,
        m.SnapshotRequest,
        m.WriteFile,
        m.ReadFile,
        m.DropSnapshot,
    }
    # the handler of a goodbye waits itself
    assert kinds - set(waited) == without_state | {m.Leave}


def test_one_pull_returns_rows_and_dense_values() -> None:
    worker = Worker(opened(plan(workers=1)), 0, 1)
    message = m.Pull([m.TablePull(1, True), m.TablePull(0, True)], dense=True)
    reply, (items, users, bias) = worker.say(message, ids_of([-5, 7]), ids_of([]), lane="pull")
    assert isinstance(reply, m.Pulled)
    assert (items.shape, users.shape, list(bias)) == ((2, 2), (0, 2), [1, 1, 1])


def test_a_pull_without_insert_creates_no_row() -> None:
    server = opened(plan(workers=1))
    worker = Worker(server, 0, 1)
    assert worker.pull(0, [1, 2, 3], insert=False) == [0, 0, 0]
    assert server.metrics().rows == {"users": 0, "items": 0}
    worker.pull(0, [1, 2, 1])
    assert server.metrics().rows == {"users": 2, "items": 0}


@pytest.mark.parametrize(
    ("message", "arrays", "text"),
    [
        (m.Pull([m.TablePull(2, True)], False), [ids_of([1])], r"table 2.*'users', 'items'"),
        (m.Pull([m.TablePull(-1, True)], False), [ids_of([1])], "table -1"),
        (m.Pull([m.TablePull(0, True)], False), [], "came with 0 arrays, the ids of table 'users'"),
        (m.Pull([], False), [ids_of([1])], "came with 1 arrays, expected 0"),
        (
            m.Pull([m.TablePull(0, True)], False),
            [np.zeros(3, np.int32)],
            r"ids of table 'users' are int32\[3\], expected int64\[n\]",
        ),
        (
            m.Fill([0], False),
            [ids_of([1, 2]), np.zeros((2, 5), np.float32)],
            r"rows of table 'users' are float32\[2, 5\], expected float32\[2, 2\]",
        ),
    ],
)
def test_requests_that_do_not_fit_the_plan_are_refused(
    message: m.Message, arrays: list[np.ndarray], text: str
) -> None:
    worker = Worker(opened(plan(workers=1)), 0, 1)
    with pytest.raises((PlanError, ProtocolError), match=text):
        worker.say(message, *arrays)


def test_only_worker_0_sends_initial_values() -> None:
    first, second = team(opened(plan()))
    arrays = [ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32)]
    first.say(m.Fill([0], True), *arrays)
    assert second.pull(0, [9, 1, 2]) == [6, 5, 0]
    assert second.dense() == [7, 8, 9]
    # a restarted worker 0 sends them again, perhaps while others already train
    first.say(m.Fill([0], True), ids_of([1]), rows_of([4]), np.array([4, 4, 4], np.float32))
    assert second.pull(0, [1]) == [5]
    assert second.dense() == [7, 8, 9]
    with pytest.raises(ProtocolError, match="worker 1 sent initial values"):
        second.say(m.Fill([0], True), *arrays)


def test_bfloat16_crosses_sockets() -> None:
    the_plan = plan("sync", 1, dense=[DensePlan("bias", (3,), "bfloat16", 0, 0)])
    server = closed_server(1)
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    server.open(the_plan, [torch.optim.SGD([weight], lr=1.0)], [weight])
    listener = Listener(("127.0.0.1", 0), server)
    greeting = partial(hello, 0, "control", 1)
    channel = SocketChannel.connect(listener.address, "server 0", deadline_s=20, greeting=greeting)
    try:
        push = m.Push(0, 0, 0, 0, 0, OPTIONS, [], dense=True)
        gradient = flat_array(torch.tensor([1.0, 0.5, -2.0], dtype=torch.bfloat16))
        [array] = channel.call(push, [gradient]).arrays
        assert as_tensor(array, torch.bfloat16).tolist() == [0.0, 0.5, 3.0]
        fetched = channel.call(m.FetchDense())
        assert isinstance(fetched.message, m.FetchedDense)
        restore = m.RestoreDense(fetched.message.state, fetched.message.scalars)
        assert channel.call(restore, fetched.arrays).message == m.Done()
    finally:
        channel.close()
        listener.stop()


def test_closing_a_server_fails_waiting_requests() -> None:
    server = opened(plan())
    first, _ = team(server)
    closed, _ = together(lambda: first.push(0), lambda: server.close("out of memory"))
    assert isinstance(closed, PeerLostError)
    assert "server 0 has closed: out of memory" in str(closed)
    assert server.closed
    server.wait()


def test_shrink_without_an_admission_rule_is_refused() -> None:
    worker = Worker(opened(plan(workers=1)), 0, 1)
    with pytest.raises(PlanError, match="users"):
        worker.say(m.Shrink(0, 3, 0.0, 1.0))


def test_a_join_during_a_checkpoint_load_is_told_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading may take longer than any deadline, so no reply may wait for its end."""
    monkeypatch.setattr(server_module, "_LOADING_S", 0.01)
    server, the_plan = closed_server(1), plan(workers=1)
    worker = Worker(server, 0, 1)
    replies = []

    def values() -> Any:
        replies.append(worker.say(m.Join(the_plan))[0])
        yield m.Fill([0], False, loaded=True), [ids_of([1]), rows_of([5])]

    weight = torch.nn.Parameter(torch.ones(3))
    server.open(the_plan, [torch.optim.SGD([weight], lr=1.0)], [weight], values)
    replies.append(worker.say(m.Join(the_plan))[0])
    assert replies == [m.Done(), m.Welcome(0, 0)]
    assert worker.pull(0, [1]) == [5]


def test_a_repeated_held_push_returns_the_norm_again() -> None:
    server = opened(plan("sync", workers=1))
    worker = Worker(server, 0, 1)
    first, _ = worker.push(0, {0: ([7], [-3.0])}, hold=True)
    # a step of another optimizer has evicted the reply
    server._serving().pushes._requests._requests.clear()
    worker.sequence -= 1
    again, _ = worker.push(0, {0: ([7], [-3.0])}, hold=True)
    assert (again.square, first.square) == (18.0, 18.0)
    worker.apply(0, 0.5)
    assert worker.pull(0, [7]) == [1.5]


@pytest.mark.parametrize("index", [-1, 2, 1 << 40])
def test_an_index_that_no_worker_has_is_refused(index: int) -> None:
    server = opened(plan())
    with pytest.raises(MembershipError, match=rf"index {index}, expected 0 to 1"):
        Worker(server, index)


def test_each_greeting_waits_until_the_worker_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened(plan(workers=1))
    waits: list[str] = []
    monkeypatch.setattr(server._log, "wait_on_disk", lambda: waits.append(""))
    worker = Worker(server, 0, 1)
    greeted = len(waits)
    assert greeted
    # the first greeting may still write what makes the worker known
    worker.greet("pull")
    assert len(waits) == greeted + 1
    # a refused worker ends, and a restarted server must know why
    with pytest.raises(MembershipError, match="expected 0 to 0"):
        Worker(server, 1, 1)
    assert len(waits) == greeted + 2


# Requests of a worker, recorded on the wire and replayed by an attacker.


TOKEN = Secret("3f9ac27e51d0b846")
TABLE = m.TablePush(0)


@contextlib.contextmanager
def serving(token: Secret | None = None) -> Iterator[Endpoint]:
    listener = Listener(("127.0.0.1", 0), opened(plan("async", workers=1)), token=token)
    try:
        yield listener.address
    finally:
        listener.stop()


@contextlib.contextmanager
def recorded(server: Endpoint) -> Iterator[tuple[Endpoint, bytearray]]:
    """A proxy of the server, and all bytes that one client sends through it."""
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def carry(source: socket.socket, sink: socket.socket, keep: bytearray) -> None:
            while data := source.recv(1 << 16):
                keep.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

        def relay() -> None:
            client, _ = listening.accept()
            with client, raw_client(server) as upstream:
                replies_thread = threading.Thread(
                    target=carry, args=(upstream, client, bytearray())
                )
                replies_thread.start()
                carry(client, upstream, sent)
                replies_thread.join(LIMIT_S)

        thread = threading.Thread(target=relay)
        thread.start()
        yield listening.getsockname(), sent
        thread.join(LIMIT_S)


def worker(address: Endpoint, lane: str, token: Secret | None = None) -> SocketChannel:
    greeting = partial(hello, 0, lane, 1)
    return SocketChannel.connect(
        address, "server 0", deadline_s=LIMIT_S, token=token, greeting=greeting
    )


def numbered_push(sequence: int, epoch: int = 0) -> m.Push:
    return m.Push(sequence, epoch, 0, sequence, 0, OPTIONS, [TABLE], dense=False)


def row(channel: SocketChannel) -> float:
    pull = m.Pull([m.TablePull(0, insert=False)], dense=False)
    return float(channel.call(pull, [ids_of([7])]).arrays[0][0, 0])


def record_push(server: Endpoint, token: Secret | None = None) -> bytes:
    """A greeting and a push of 1 to row 7, as they were on the wire."""
    with recorded(server) as (proxy, sent):
        channel = worker(proxy, "push", token)
        channel.call(numbered_push(0), [ids_of([7]), rows_of([1])])
        channel.close()
    return bytes(sent)


def replay(server: Endpoint, recording: bytes, replies: int) -> list[m.Message]:
    """The first replies of a server to a recording that is sent over a new connection."""
    with raw_client(server) as raw:
        raw.sendall(recording)
        frames = Frames(Wire(raw, "the server"), LIMIT_S)
        found = [frames.receive("a test") for _ in range(replies)]
        raw.shutdown(socket.SHUT_WR)
        read_all(raw)
    return [frame.message for frame in found if frame is not None]


def test_a_replayed_push_is_not_applied_again() -> None:
    with serving() as server:
        control = worker(server, "control")
        recording = record_push(server)
        assert row(control) == -1
        _, again = replay(server, recording, 2)
        assert isinstance(again, m.Pushed)
        assert row(control) == -1
        control.close()


def test_replayed_frames_of_an_old_epoch_are_refused(tmp_path: Path) -> None:
    """A checkpoint was loaded in between, so even frames new to the server are refused."""
    with serving() as server:
        control = worker(server, "control")
        recording = record_push(server)
        (tmp_path / "token").write_text("")
        saved: Any = control.call(m.Save(str(tmp_path), "token", 0)).message
        files = [(file.table, file.name) for file in saved.files]
        control.call(m.Load(str(tmp_path), files, epoch=1))
        _, refused = replay(server, recording, 2)
        assert isinstance(refused, m.Failure)
        assert "pushed for epoch 0, but this server is in epoch 1" in refused.text
        with pytest.raises(ProtocolError, match="pushed for epoch 0"):
            control.call(numbered_push(1), [ids_of([7]), rows_of([1])])
        assert row(control) == -1
        control.call(numbered_push(1, epoch=1), [ids_of([7]), rows_of([1])])
        assert row(control) == -2
        control.close()


def test_with_a_token_a_replayed_connection_fails_the_challenge() -> None:
    with serving(TOKEN) as server:
        control = worker(server, "control", TOKEN)
        challenge, refused = replay(server, record_push(server, TOKEN), 2)
        assert isinstance(challenge, m.Challenge)
        assert isinstance(refused, m.Failure)
        assert "does not know the token" in refused.text
        np.testing.assert_equal(row(control), -1)
        control.close()


# Replies are written in the memory that a connection gives; they are those without it.


IDS = [5, -3, 1 << 40, 5000]
WIRES = [FP32, BF16, FP16, INT8]


class Given:
    """The memory that a connection gives, up to a number of arrays."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.arrays: list[Any] = []

    def output(self, shape: tuple[int, ...], dtype: str) -> Any:
        if len(self.arrays) == self.most:
            return None
        self.arrays.append(np.full(shape, 77, dtype))
        return self.arrays[-1]


def narrow(mode: str, wire: str) -> Plan:
    made = plan(mode, workers=1)
    return msgspec.structs.replace(
        made, tables=[msgspec.structs.replace(table, wire=wire) for table in made.tables]
    )


def worker_of(the_plan: Plan, given: Given | None) -> Worker:
    """The only worker of a new server."""
    worker = Worker(opened(the_plan), 0, workers=1)
    if given is not None:
        for lane in worker.lanes:
            worker.lanes[lane] = Connection(lane, output=given.output)
            worker.greet(lane)
    return worker


def pull(worker: Worker) -> list[Any]:
    message = m.Pull([m.TablePull(0, True), m.TablePull(1, False)], dense=True)
    return worker.say(message, ids_of(IDS), ids_of(IDS[:2]), lane="pull")[1]


def filled(worker: Worker) -> None:
    """Values that no form rounds."""
    arrays = [ids_of(IDS), rows_of([1, -2, 127, 0.5]), np.array([3, 4, 5], np.float32)]
    worker.say(m.Fill([0], dense=True), *arrays)


def push(worker: Worker) -> list[Any]:
    """A push whose reply has rows of a later batch and dense values."""
    message = worker.push_request(0, {}, [1, 2, 4], ahead=[0, 1])
    dense = np.array([1, 2, 4], np.float32)
    return worker.say(message, dense, ids_of(IDS), ids_of(IDS[:2]), lane="push")[1]


def exchange(worker: Worker) -> list[Any]:
    message = m.GeoExchange(1, 0, 0, [0], True, wants=True, more=False)
    assert worker.server._service is not None
    differences = encoded(rows_of([1, 1, 2, 4]), worker.server._service.state.plan.tables[0])
    return worker.say(message, ids_of(IDS), *differences, np.ones(3, np.float32), lane="push")[1]


CASES = [("async", pull), ("sync", pull), ("sync", push), ("async", push), ("geo", exchange)]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("mode", "ask"), CASES)
def test_replies_are_in_the_memory_of_the_connection(mode: str, ask: Any, wire: str) -> None:
    given = Given()
    expected, found = (ask(worker) for worker in two_workers(narrow(mode, wire), given))
    assert len(found) == len(given.arrays)
    for array, memory, other in zip(found, given.arrays, expected, strict=True):
        assert np.may_share_memory(array, memory)
        assert (array.shape, array.dtype) == (memory.shape, memory.dtype)
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize(("mode", "ask"), CASES)
def test_replies_need_no_memory_of_the_connection(mode: str, ask: Any, most: int) -> None:
    expected, found = (ask(w) for w in two_workers(narrow(mode, INT8), Given(most)))
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, other)


def two_workers(the_plan: Plan, given: Given) -> list[Worker]:
    workers = [worker_of(the_plan, None), worker_of(the_plan, given)]
    for worker in workers:
        filled(worker)
    return workers


def test_replies_to_a_step_of_several_workers_share_a_copy_of_the_dense_values() -> None:
    workers, given = team(opened(plan("sync", workers=2))), Given()
    for worker in workers:
        worker.lanes["push"] = Connection("push", output=given.output)
        worker.greet("push")
    replies = of_all(workers, lambda w: w.push(0, dense=[1, 2, 4])[1])
    assert replies[0][0] is replies[1][0]
    assert not given.arrays


def test_dense_values_are_shared_only_without_memory() -> None:
    """A connection's memory is overwritten by its next reply."""
    worker = worker_of(plan("async", workers=1), given := Given(1))
    assert worker.dense() == [1, 1, 1]
    given.arrays[0][:] = 0
    shared = worker.say(m.Pull([], dense=True), lane="pull")[1][0]
    assert shared.tolist() == [1, 1, 1]
    assert worker.say(m.Pull([], dense=True), lane="pull")[1][0] is shared


def test_a_repeated_push_has_the_reply_of_the_first() -> None:
    worker = worker_of(plan("sync", workers=1), Given())
    filled(worker)
    message = worker.push_request(0, {}, [1, 2, 4])
    dense = np.array([1, 2, 4], np.float32)
    first = worker.say(message, dense, lane="push")[1][0].copy()
    worker.lanes["push"] = Connection("push", output=Given().output)
    worker.greet("push")
    np.testing.assert_array_equal(worker.say(message, dense, lane="push")[1][0], first)
    assert first.tolist() == [2, 2, 1]


@pytest.mark.parametrize("wire", WIRES)
def test_values_that_are_not_finite_arrive_so(wire: str) -> None:
    worker = worker_of(narrow("async", wire), given := Given())
    bad = rows_of([np.nan, np.inf, -np.inf, 127])
    bad[:3, 1] = 1
    worker.say(m.Fill([0], dense=False), ids_of(IDS), bad)
    pulled = worker.say(m.Pull([m.TablePull(0, True)], False), ids_of(IDS), lane="pull")[1]
    assert len(pulled) == len(given.arrays)
    found = FORMS[wire].decode(pulled)
    # a row of int8 has one scale
    expected = np.where(np.isfinite(bad).all(axis=1, keepdims=True), bad, np.nan)
    np.testing.assert_array_equal(found, expected if wire == INT8 else bad)


def test_ids_that_a_peer_changes_meanwhile_damage_no_index() -> None:
    """Arrays may be memory that a worker still writes to."""
    worker = worker_of(plan("async", workers=1), None)
    ids, rows = np.arange(50_000), np.ones((50_000, 2), np.float32)
    stop = threading.Event()

    def write_nonsense() -> None:
        random = np.random.default_rng(0)
        while not stop.is_set():
            ids[:] = random.integers(-(2**62), 2**62, len(ids))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write_nonsense)
        try:
            for step in range(10):
                message = worker.push_request(step, {0: None}, None)
                worker.say(message, ids, rows, lane="push")
        finally:
            stop.set()
    assert worker.server._service is not None
    table = worker.server._service.state.table(0)
    known = table._rows.ids_of(table._rows.numbers)
    assert len(np.unique(known)) == len(known) == len(table)
    np.testing.assert_array_equal(table._rows.find(known), table._rows.numbers)


# WriteAheadLog: a reply waits until every change that it may show is logged.


@pytest.fixture
def journal(tmp_path: Path) -> Any:
    journal = Journal(tmp_path, CODEC, 1, Policy(sync=NEVER), lambda text: None)
    yield journal
    journal.close()


def test_a_reader_waits_for_a_change_in_progress(journal: Any) -> None:
    log = WriteAheadLog()
    log.start(journal, values=True)
    applied, may_continue = threading.Event(), threading.Event()

    def act() -> None:
        applied.set()
        assert may_continue.wait(20)

    writer = threading.Thread(target=lambda: log.apply(PhaseEnded(0, 0), [], act))
    writer.start()
    assert applied.wait(20)
    # a reader may see the change from now on
    sizes: list[int] = []
    reader = threading.Thread(target=lambda: (log.wait_on_disk(), sizes.append(journal.size)))
    reader.start()
    reader.join(0.05)
    may_continue.set()
    for thread in (writer, reader):
        thread.join(20)
    assert sizes[0] > 0


def test_without_values_no_reader_waits_for_a_change(journal: Any) -> None:
    log = WriteAheadLog()
    log.wait_on_disk()
    log.start(journal, values=False)
    log.append(PhaseEnded(0, 0))
    with log.lock:
        thread = threading.Thread(target=log.wait_on_disk)
        thread.start()
        thread.join(20)
    assert journal.size > 0


@pytest.mark.parametrize("message", [m.Pull([], True), m.FetchDense()])
def test_a_reply_waits_for_the_log_records_of_other_changes(
    tmp_path: Path, message: m.Message
) -> None:
    server = closed_server(workers=1)
    policy = Policy(sync=NEVER)
    open_up(server, plan(workers=1), Durable(tmp_path / "kept", job="a job", policy=policy))
    worker = Worker(server, 0, workers=1)
    # another thread has made a change that is not committed yet
    server._log.append(PhaseEnded(0, 0))
    assert server._durability is not None
    journal = server._durability._journal
    assert journal is not None
    before = journal.size
    worker.say(message, lane="pull")
    assert journal.size > before
    server.close()


# SharedExclusiveLock: many shared holders, or one exclusive holder.


def test_shared_holders_do_not_block_each_other() -> None:
    values_lock = SharedExclusiveLock(5)
    with values_lock.shared(), values_lock.shared():
        pass
    with values_lock.exclusive():
        pass
    with values_lock.shared():
        pass


def test_exclusive_waits_for_shared_holders() -> None:
    values_lock = SharedExclusiveLock(0.02)
    with (
        values_lock.shared(),
        pytest.raises(DeadlineError, match=r"0\.02 s for the pushes in progress"),
    ):
        values_lock.exclusive().__enter__()
    # a waiter that timed out does not block others
    with values_lock.shared():
        pass


def test_no_other_holder_enters_while_one_is_exclusive() -> None:
    values_lock = SharedExclusiveLock(0.02)
    with values_lock.exclusive():
        with pytest.raises(DeadlineError, match="a push waited"):
            values_lock.shared().__enter__()
        with pytest.raises(DeadlineError, match="for another one"):
            values_lock.exclusive().__enter__()


def test_shared_waits_until_the_exclusive_holder_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    values_lock, inside, seen = SharedExclusiveLock(20), threading.Event(), []

    def enter_shared() -> None:
        with values_lock.shared():
            inside.set()
            seen.append("shared")

    with values_lock.exclusive():
        waits = called(values_lock, "_wait", monkeypatch)
        thread = threading.Thread(target=enter_shared)
        thread.start()
        assert waits.wait(20)
        assert not inside.wait(0.2)
        seen.append("exclusive")
    thread.join(20)
    assert seen == ["exclusive", "shared"]


@pytest.mark.parametrize("message", [m.Fill([], False), m.Shrink(0, 0, 0.0, 1.0)])
def test_fill_and_shrink_take_the_lock_shared(
    message: m.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPlan("count", 2.0)
    tables = [msgspec.structs.replace(table, entry=entry) for table in plan().tables]
    server = opened(plan("async", tables=tables))
    worker, _ = team(server)
    with server._values_lock.exclusive():
        waits = called(server._values_lock, "_wait", monkeypatch)
        changing = threading.Thread(target=lambda: worker.say(message))
        changing.start()
        assert waits.wait(20)
        changing.join(0.2)
        assert changing.is_alive()
    changing.join(20)
    assert not changing.is_alive()
