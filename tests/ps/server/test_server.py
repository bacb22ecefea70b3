# SPDX-License-Identifier: Apache-2.0
"""Server: joining, pulls, initial values, and what all modes have in common."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.chaos.fuzzing.making import any_value
from tests.ps.serving import (
    OPTIONS,
    Worker,
    closed_server,
    hello,
    ids_of,
    open_up,
    opened,
    plan,
    rows_of,
    team,
    together,
)

from fleetlight.errors import (
    DeadlineError,
    MembershipError,
    PeerLostError,
    PlanError,
    ProtocolError,
)
from fleetlight.ps import messages as m
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.plan import DensePlan
from fleetlight.ps.server import server as server_module
from fleetlight.ps.transport import Connection, Listener, SocketChannel


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
    server = opened(plan())
    first, second = team(server)
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
