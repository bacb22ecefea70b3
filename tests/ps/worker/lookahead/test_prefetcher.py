# SPDX-License-Identifier: Apache-2.0
"""Rows of later batches are read ahead: in a prefetch, or in the reply to a push."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.gates import Gate
from tests.ps.serving import Worker, opened, plan
from tests.served import ASYNC, SYNC, Job, Member, Net, batches, loss_of, run
from torch import nn

from fleetlight.errors import GradientError, PeerLostError, PlanError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.ps.layers.handle import Asked
from fleetlight.ps.worker.connections import PREFETCH, PULL, PUSH
from fleetlight.ps.worker.lookahead.prefetcher import Prefetcher
from fleetlight.ps.worker.lookahead.pull_in_push import PullInPush

# Prefetcher: prefetched rows equal rows fetched on demand, in any order of replies.


IDS = 30


def run_remotely(*job: Any, **facts: Any) -> list[Any]:
    """Train with servers on another host."""
    return run(*job, is_local=False, **facts)


def build(**layer: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Net(**layer)
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def step(worker: Member, ids: Any, target: Any = None) -> None:
    ids = torch.as_tensor(ids).view(-1, 3)
    worker.optimizer.zero_grad()
    loss_of(worker.model, ids, torch.ones(len(ids), 1) if target is None else target).backward()
    worker.optimizer.step()


def announce(worker: Member, *ids: Any) -> None:
    """Announce the ids of the next batch; without ids the current batch is the last."""
    flat = {0: np.concatenate([np.asarray(i).reshape(-1) for i in ids])} if ids else {}
    worker.communicator.announce([flat] if ids else [])


def prefetcher(worker: Member) -> Prefetcher:
    assert isinstance(worker.communicator.lookahead, Prefetcher)
    return worker.communicator.lookahead


def wait_for_prefetch(worker: Member) -> None:
    """Wait until the prefetch has finished."""
    pending = prefetcher(worker)._next
    assert pending is not None
    pending.pulled.result(20)


def read(worker: Member, *ids: int) -> Any:
    """The rows that a forward would read."""
    [(wanted, rows)] = worker.communicator.look_up([Asked(0, np.array(ids), True)])
    return rows[wanted.inverse]


def final_values(worker: Member) -> Any:
    worker.barrier()
    dense = [p.detach().clone() for p in worker.model.linear.parameters()]  # type: ignore[union-attr]
    return worker.rows(range(IDS)), dense, worker.communicator.metrics()


def assert_same_with_rows_read_ahead(plain: list[Any], ahead: list[Any]) -> None:
    for (rows, dense, _), (rows_, dense_, metrics) in zip(plain, ahead, strict=True):
        assert np.array_equal(rows, rows_)
        assert all(torch.equal(a, b) for a, b in zip(dense, dense_, strict=True))
        assert metrics["rows_read_ahead"] > 3 * metrics["rows_on_demand"] > 0


def trained_with_prefetch(worker: Member, ahead: bool, steps: int = 40) -> Any:
    ids, targets = batches(steps, 2, ids=IDS)
    for t in range(steps):
        if ahead:
            # each announcement omits some ids of the batch
            announce(worker, *([ids[t + 1, worker.index][t % 3 :]] if t + 1 < steps else []))
        step(worker, ids[t, worker.index], targets[t, worker.index])
    return final_values(worker)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [3, 1])
def test_sync_training_is_bitwise_the_same_with_prefetch(servers: int) -> None:
    plain = run_remotely(build, lambda w: trained_with_prefetch(w, False), servers=servers)
    ahead = run_remotely(build, lambda w: trained_with_prefetch(w, True), servers=servers)
    assert_same_with_rows_read_ahead(plain, ahead)


@pytest.mark.parametrize("holds", ["nothing", "send", "receive"])
def test_replies_of_push_and_prefetch_may_arrive_in_either_order(holds: str) -> None:
    """Held at `send`, the servers see the pull after the push; at `receive`, before it."""

    def train(worker: Member) -> None:
        gate = Gate(worker.session.client, PREFETCH, holds)
        announce(worker, [2, 3, 4])
        if holds == "nothing":
            wait_for_prefetch(worker)
        else:
            gate.wait()
        before = worker.rows([2, 3, 4])
        step(worker, [1, 2, 3])
        gate.open()
        announce(worker)
        assert not np.array_equal(worker.rows([2, 3]), before[:2])
        assert np.array_equal(read(worker, 2, 3, 4), worker.rows([2, 3, 4]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 3

    run_remotely(build, train, workers=1)


def test_rows_are_fetched_again_after_a_second_step() -> None:
    """The servers forget the ids at the first push, so the second reports no changes."""

    def train(worker: Member) -> None:
        announce(worker, [2, 3, 4])
        wait_for_prefetch(worker)
        for _ in range(2):
            step(worker, [1, 2, 3])
        announce(worker)
        assert np.array_equal(read(worker, 2, 3, 4), worker.rows([2, 3, 4]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 0

    run_remotely(build, train, workers=1)


def test_rows_of_the_current_batch_are_stale_after_its_step() -> None:
    def train(worker: Member) -> None:
        announce(worker, [1, 2, 3])
        announce(worker)
        for _ in range(2):
            step(worker, [1, 2, 3])
            assert np.array_equal(read(worker, 1, 2, 3), worker.rows([1, 2, 3]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 3

    run_remotely(build, train, workers=1)


def test_prefetch_works_with_gradient_accumulation() -> None:
    def train(worker: Member) -> None:
        announce(worker, [1, 2, 3])
        for part in ([4, 5, 6], [7, 8, 9]):
            announce(worker, part)
            loss_of(worker.model, torch.tensor([[1, 2, 3]]), torch.ones(1, 1)).backward()
        worker.optimizer.step()
        announce(worker)
        assert np.array_equal(read(worker, 7, 8, 9), worker.rows([7, 8, 9]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 6

    run_remotely(build, train, workers=1)


def test_a_prefetched_batch_that_is_not_trained_creates_no_rows() -> None:
    def train(worker: Member) -> Any:
        announce(worker, [7, 8, 9])
        wait_for_prefetch(worker)
        step(worker, [1, 2, 3])
        return [counted.rows for counted in worker.session.client.metrics()]

    assert run_remotely(build, train, workers=1) == [[{"emb": 3}]]


def test_tables_with_an_admission_rule_are_not_prefetched() -> None:
    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        announce(worker)
        read(worker, 1, 2, 3)
        return worker.communicator.metrics()

    def counted() -> Any:
        return build(entry=CountFilterEntry(2))

    assert "rows_read_ahead" not in run_remotely(counted, train, workers=1)[0]


def test_rows_changed_during_a_barrier_are_fetched_again() -> None:
    """Other workers change rows that this worker prefetched, and no push of its own reports it."""

    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        wait_for_prefetch(worker)
        if worker.index == 1:
            for _ in range(3):
                step(worker, [1, 2, 3])
        worker.barrier()
        announce(worker)
        return read(worker, 1, 2, 3), worker.rows([1, 2, 3])

    for found, on_demand in run_remotely(build, train):
        assert np.array_equal(found, on_demand)


def have_a_step_refused(worker: Member) -> None:
    worker.optimizer.zero_grad()
    loss_of(worker.model, torch.arange(9).view(3, 3), torch.ones(3, 1)).backward()
    grad: Any = worker.model.emb.weight.grad  # type: ignore[union-attr]
    grad.parts[0].gradients[-1] = np.nan  # on the last server
    with pytest.raises(GradientError, match="emb"):
        worker.optimizer.step()


def test_rows_are_right_after_a_refused_step() -> None:
    def train(worker: Member) -> None:
        announce(worker, [*range(9)])
        wait_for_prefetch(worker)
        have_a_step_refused(worker)
        announce(worker)
        assert np.array_equal(read(worker, *range(9)), worker.rows(range(9)))

    run_remotely(build, train, workers=1, servers=3)


def test_stale_rows_are_not_read() -> None:
    """With staleness 0, rows prefetched before a step of this worker lack that step."""

    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        wait_for_prefetch(worker)
        step(worker, [1, 2, 3])
        announce(worker)
        return np.array_equal(read(worker, 1, 2, 3), worker.rows([1, 2, 3]))

    strict = {"a_sync": True, "a_sync_configs": {"staleness": 0}}
    assert run_remotely(build, train, strict, workers=1) == [True]


def test_rows_from_an_earlier_incarnation_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarted server does not know the prefetched ids, so it reports no changes."""

    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        wait_for_prefetch(worker)
        announce(worker)
        before = worker.communicator.metrics()["rows_read_ahead"]
        read(worker, 1, 2, 3)
        # a lane has connected to the second incarnation
        incarnations = worker.communicator.client.incarnations
        monkeypatch.setattr(
            worker.communicator.client,
            "incarnations",
            lambda *lanes: incarnations(*lanes) if lanes else [1, 2],
        )
        read(worker, 1, 2, 3)
        metrics = worker.communicator.metrics()
        return metrics["rows_read_ahead"] - before, metrics["rows_on_demand"]

    assert run_remotely(build, train, workers=1, servers=2) == [(3, 3)]


def test_async_reads_prefetched_rows_with_newer_dense_values() -> None:
    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        wait_for_prefetch(worker)
        old = worker.rows([1, 2, 3])
        step(worker, [1, 2, 3])
        worker.communicator.flush()
        announce(worker)
        worker.communicator.refresh()
        assert np.array_equal(read(worker, 1, 2, 3), old)
        return worker.communicator.versions

    # the version of a server with dense values is that of the dense values
    assert run_remotely(build, train, ASYNC, workers=1) == [[1]]


def test_an_error_of_the_prefetch_is_raised_by_the_read() -> None:
    job = Job(build, SYNC, workers=1, servers=1, is_local=False)

    def train(worker: Member) -> None:
        job.servers[0].close("for a test")
        announce(worker, [1, 2, 3])
        announce(worker)
        read(worker, 1, 2, 3)

    [error] = job.tried(train)
    assert isinstance(error, PeerLostError)
    assert "for a test" in str(error)


def test_layers_that_share_a_table_are_prefetched() -> None:
    class SharedTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (SparseEmbedding(2, table="t") for _ in range(2))

        def forward(self, a: Any, b: Any) -> Any:
            return (self.a(a) * self.b(b)).sum(1, keepdim=True)

    def build_shared() -> Any:
        model = SharedTable()
        return model, [torch.optim.SGD(model.parameters(), lr=0.5)]

    def train(ahead: bool) -> Callable[[Member], Any]:
        def work(worker: Member) -> Any:
            ids = torch.tensor([[0, 5], [1, 5], [2, 6], [0, 1], [9, 1]])
            for t in range(4):
                if ahead:
                    announce(worker, ids[t + 1])
                worker.optimizer.zero_grad()
                worker.model(ids[t, :1], ids[t, 1:]).sum().backward()
                worker.optimizer.step()
            return worker.rows(range(10)), worker.communicator.metrics().get("rows_read_ahead")

        return work

    [(rows, _)] = run_remotely(build_shared, train(False), workers=1, servers=2)
    [(rows_, ahead)] = run_remotely(build_shared, train(True), workers=1, servers=2)
    assert np.array_equal(rows, rows_)
    assert ahead == 6


# PullInPush: the reply to a push has the rows of a later batch, as a pull would return them.


class Announcing:
    """Announces batches as a loader does: the same mapping is the same batch."""

    def __init__(self, worker: Member, batches: list[Any], ahead: int) -> None:
        self._worker, self._ahead, self._at = worker, ahead, 0
        self._batches = [{0: np.asarray(ids).reshape(-1)} for ids in batches]

    def next(self) -> None:
        self._at += 1
        self._worker.communicator.announce(self._batches[self._at : self._at + self._ahead])


class Sent:
    """The messages that a worker sends on a lane."""

    def __init__(self, worker: Member, lane: str) -> None:
        self.messages: list[m.Message] = []
        for channel in worker.session.client.open_lane(lane):
            self._watch(channel)

    def _watch(self, channel: Any) -> None:
        send = channel.send

        def watched(message: m.Message, arrays: Any = ()) -> None:
            self.messages.append(message)
            send(message, arrays)

        channel.send = watched


def trained(worker: Member, ahead: int, steps: int = 30) -> Any:
    ids, targets = batches(steps, 2, ids=IDS)
    # each announcement omits some ids of the batch
    announced = [ids[t, worker.index][t % 3 :] for t in range(steps)]
    announcing = Announcing(worker, announced, ahead)
    for t in range(steps):
        if ahead:
            announcing.next()
        step(worker, ids[t, worker.index], targets[t, worker.index])
    return final_values(worker)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [3, 1])
def test_sync_training_is_bitwise_the_same(servers: int) -> None:
    plain = run(build, lambda w: trained(w, 0), servers=servers)
    ahead = run(build, lambda w: trained(w, 1), servers=servers)
    assert_same_with_rows_read_ahead(plain, ahead)


@pytest.mark.parametrize(
    ("strategy", "ahead", "expected"), [(SYNC, 1, [1, 1, 1, 1, 1]), (ASYNC, 2, [2, 1, 1, 1, 0])]
)
def test_a_step_is_one_message(strategy: dict[str, Any], ahead: int, expected: list[int]) -> None:
    batches = [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]]

    def train(worker: Member) -> Any:
        assert isinstance(worker.communicator.lookahead, PullInPush)
        pulls, pushes = Sent(worker, PULL), Sent(worker, PUSH)
        announcing = Announcing(worker, batches, ahead)
        for ids in batches[:-1]:
            announcing.next()
            step(worker, ids)
        # the first batch is never announced; the reply to its push arrives after the second lookup
        assert len(pulls.messages) == ahead
        return [len(one.ahead) for one in pushes.messages if isinstance(one, m.Push)]

    assert run(build, train, strategy, workers=1) == [expected]


def test_rows_are_those_after_the_step_in_sync() -> None:
    def train(worker: Member) -> None:
        announcing = Announcing(worker, [[0], [2, 3, 4]], 1)
        announcing.next()
        before = worker.rows([2, 3, 4])
        step(worker, [1, 2, 3])
        announcing.next()
        pulls = Sent(worker, PULL)
        found = read(worker, 2, 3, 4)
        assert not pulls.messages
        assert np.array_equal(found, worker.rows([2, 3, 4]))
        assert not np.array_equal(found[:2], before[:2])

    run(build, train, workers=1, servers=2)


def test_a_second_step_on_a_batch_renews_the_rows() -> None:
    def train(worker: Member) -> None:
        announcing = Announcing(worker, [[0], [2, 3, 4]], 1)
        announcing.next()
        for _ in range(2):
            step(worker, [1, 2, 3])
        announcing.next()
        assert np.array_equal(read(worker, 2, 3, 4), worker.rows([2, 3, 4]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 3

    run(build, train, workers=1)


def test_pushed_rows_of_the_current_batch_are_stale_after_its_step() -> None:
    def train(worker: Member) -> None:
        announcing = Announcing(worker, [[0], [1, 2, 3]], 1)
        announcing.next()
        step(worker, [7, 8, 9])
        announcing.next()
        for _ in range(2):
            step(worker, [1, 2, 3])
            assert np.array_equal(read(worker, 1, 2, 3), worker.rows([1, 2, 3]))

    run(build, train, workers=1)


def test_the_first_lookup_of_a_batch_without_rows_pulls_all_its_tables() -> None:
    """As with gradient accumulation, where no push brought the rows."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = SparseEmbedding(2), SparseEmbedding(2)

        def forward(self, a: Any, b: Any) -> Any:
            return (self.a(a) * self.b(b)).sum(1, keepdim=True)

    def two() -> Any:
        model = Two()
        return model, [torch.optim.SGD(model.parameters(), lr=0.5)]

    def train(worker: Member) -> None:
        ids = np.array([1, 2, 3])
        for _ in range(2):
            worker.communicator.announce([{0: ids, 1: ids + 9}])
        pulls = Sent(worker, PULL)
        for table, its in ((0, ids), (1, ids + 9)):
            worker.communicator.look_up([Asked(table, its, True)])
        [pull] = pulls.messages
        assert isinstance(pull, m.Pull)
        assert [one.table for one in pull.tables] == [0, 1]

    run(two, train, workers=1)


@pytest.mark.parametrize("strategy", [SYNC, ASYNC])
def test_an_announced_batch_that_is_not_trained_creates_no_rows(strategy: dict[str, Any]) -> None:
    def train(worker: Member) -> Any:
        Announcing(worker, [[0], [7, 8, 9], [4]], 2).next()
        step(worker, [1, 2, 3])
        worker.communicator.flush()
        return [counted.rows for counted in worker.session.client.metrics()]

    assert run(build, train, strategy, workers=1) == [[{"emb": 3}]]


def test_tables_with_an_admission_rule_are_not_announced() -> None:
    def train(worker: Member) -> Any:
        for _ in range(2):
            worker.communicator.announce([{0: np.array([1, 2, 3])}])
            step(worker, [1, 2, 3])
        return worker.communicator.metrics()

    def counted() -> Any:
        return build(entry=CountFilterEntry(2))

    assert "rows_read_ahead" not in run(counted, train, workers=1)[0]


def test_rows_changed_during_a_barrier_are_read_again() -> None:
    def train(worker: Member) -> Any:
        announcing = Announcing(worker, [[0], [1, 2, 3]], 1)
        announcing.next()
        step(worker, [7, 8, 9])
        if worker.index == 1:
            for _ in range(3):
                step(worker, [1, 2, 3])
        worker.barrier()
        announcing.next()
        return read(worker, 1, 2, 3), worker.rows([1, 2, 3])

    for found, on_demand in run(build, train):
        assert np.array_equal(found, on_demand)


def test_pulled_rows_are_right_after_a_refused_step() -> None:
    def train(worker: Member) -> None:
        announcing = Announcing(worker, [[0], [*range(9)]], 1)
        announcing.next()
        have_a_step_refused(worker)
        announcing.next()
        assert np.array_equal(read(worker, *range(9)), worker.rows(range(9)))

    run(build, train, workers=1, servers=3)


def test_clipped_steps_bring_rows_too() -> None:
    def train(worker: Member) -> None:
        announcing = Announcing(worker, [[0], [1, 2, 3]], 1)
        announcing.next()
        worker.optimizer.zero_grad()
        loss_of(worker.model, torch.tensor([[1, 2, 3]]), torch.ones(1, 1)).backward()
        worker.clip(1e-3)
        worker.optimizer.step()
        announcing.next()
        pulls = Sent(worker, PULL)
        found = read(worker, 1, 2, 3)
        assert not pulls.messages
        assert np.array_equal(found, worker.rows([1, 2, 3]))

    run(build, train, workers=1, servers=2)


def test_rows_without_enough_steps_of_all_workers_are_read_again() -> None:
    """With staleness 0, rows that arrived before the last step lack it."""

    def train(worker: Member) -> Any:
        announcing = Announcing(worker, [[0], [4, 5, 6], [1, 2, 3], [7]], 2)
        for ids in ([7, 8, 9], [1, 2, 3]):
            announcing.next()
            step(worker, ids)
        announcing.next()
        return np.array_equal(read(worker, 1, 2, 3), worker.rows([1, 2, 3]))

    strict = {"a_sync": True, "a_sync_configs": {"staleness": 0}}
    assert run(build, train, strict, workers=1) == [True]


def test_announced_ids_of_the_wrong_type_are_refused() -> None:
    def train(worker: Member) -> None:
        client = worker.session.client
        [channel] = client.open_lane(PUSH)
        push = m.Push(1, client.epoch, 0, 0, 0, [{"lr": 0.1}], [], False, ahead=[0])
        for ids, error in (([np.zeros(2, np.int32)], PlanError), ([], ProtocolError)):
            with pytest.raises(error, match="ids of table 'emb'"):
                channel.call(push, ids)

    run(build, train, workers=1)


def test_async_with_a_server_in_the_process_has_no_stale_rows() -> None:
    def train(worker: Member) -> Any:
        batches = [[n, n + 1, n + 2] for n in range(8)]
        announcing = Announcing(worker, batches, 2)
        for ids in batches[:6]:
            announcing.next()
            assert np.array_equal(read(worker, *ids), worker.rows(ids))
            step(worker, ids)
        return worker.session.client.metrics()[0].staleness

    assert run(build, train, ASYNC, workers=1, is_embedded=True) == [{0: 6}]


def test_async_counts_the_staleness_of_the_rows_that_it_reads() -> None:
    def train(worker: Member) -> Any:
        batches = [[0], *([n, n + 1, n + 2] for n in range(1, 9))]
        announcing = Announcing(worker, batches, 2)
        for ids in batches[1:6]:
            step(worker, ids)
            announcing.next()
        worker.communicator.flush()
        return worker.session.client.metrics()[0].staleness

    [staleness] = run(build, train, ASYNC, workers=1)
    assert sum(staleness.values()) == 5
    assert max(staleness) <= 1


@pytest.mark.parametrize("memory", [None, 1])
def test_servers_expect_the_rows_of_files(memory: int | None) -> None:
    """Each announced batch once, without waiting, and only where a table has a file."""
    batches = [np.arange(9 * t, 9 * t + 9) % 200 for t in range(12)]

    def train(worker: Member) -> Any:
        pulls, expected = Sent(worker, PULL), Sent(worker, PREFETCH) if memory else None
        announcing = Announcing(worker, batches, 1)
        for ids in batches[:-1]:
            announcing.next()
            step(worker, ids)
        worker.barrier()
        if expected is None:
            assert PREFETCH not in worker.session.client._lanes
            return None
        assert not [o for o in pulls.messages if isinstance(o, m.Pull) and o.soon]
        [first, *_] = expected.messages
        assert first == m.Pull([m.TablePull(0, insert=False)], dense=False, soon=True)
        return len(expected.messages)

    found = run(lambda: build(memory=memory), train)
    assert found == [11 if memory else None] * len(found)


def test_a_server_that_expects_rows_inserts_none() -> None:
    server = opened(plan("async"))
    worker = Worker(server, 0)
    request = m.Pull([m.TablePull(0, insert=False)], dense=False, soon=True)
    reply, arrays = worker.say(request, np.arange(5))
    assert isinstance(reply, m.Pulled)
    assert arrays == []
    assert server.metrics().rows == {"users": 0, "items": 0}
