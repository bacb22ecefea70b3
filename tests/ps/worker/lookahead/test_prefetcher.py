# SPDX-License-Identifier: Apache-2.0
"""Prefetcher: prefetched rows equal rows fetched on demand, in any order of replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.gates import Gate
from tests.served import ASYNC, SYNC, Job, Member, Net, batches, loss_of
from tests.served import run as run_anywhere
from torch import nn

from fleetlight.errors import GradientError, PeerLostError
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.layers.entries import CountFilterEntry
from fleetlight.ps.layers.handle import Asked
from fleetlight.ps.worker.connections import PREFETCH
from fleetlight.ps.worker.lookahead.prefetcher import Prefetcher

IDS = 30


def run(*job: Any, **facts: Any) -> list[Any]:
    """Train with servers on another host."""
    return run_anywhere(*job, is_local=False, **facts)


def build(**layer: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Net(**layer)
    return model, [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def step(worker: Member, ids: Any, target: Any) -> None:
    worker.optimizer.zero_grad()
    loss_of(worker.model, ids, target).backward()
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


def trained(worker: Member, ahead: bool, steps: int = 40) -> Any:
    ids, targets = batches(steps, 2, ids=IDS)
    for t in range(steps):
        if ahead:
            # each announcement omits some ids of the batch
            announce(worker, *([ids[t + 1, worker.index][t % 3 :]] if t + 1 < steps else []))
        step(worker, ids[t, worker.index], targets[t, worker.index])
    worker.barrier()
    dense = [p.detach().clone() for p in worker.model.linear.parameters()]  # type: ignore[union-attr]
    return worker.rows(range(IDS)), dense, worker.communicator.metrics()


@pytest.mark.slow
@pytest.mark.parametrize("servers", [3, 1])
def test_sync_training_is_bitwise_the_same_with_prefetch(servers: int) -> None:
    plain = run(build, lambda w: trained(w, False), servers=servers)
    ahead = run(build, lambda w: trained(w, True), servers=servers)
    for (rows, dense, _), (rows_, dense_, metrics) in zip(plain, ahead, strict=True):
        assert np.array_equal(rows, rows_)
        assert all(torch.equal(a, b) for a, b in zip(dense, dense_, strict=True))
        assert metrics["rows_read_ahead"] > 3 * metrics["rows_on_demand"] > 0


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
        step(worker, torch.tensor([[1, 2, 3]]), torch.ones(1, 1))
        gate.open()
        announce(worker)
        assert not np.array_equal(worker.rows([2, 3]), before[:2])
        assert np.array_equal(read(worker, 2, 3, 4), worker.rows([2, 3, 4]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 3

    run(build, train, workers=1)


def test_rows_are_fetched_again_after_a_second_step() -> None:
    """The servers forget the ids at the first push, so the second reports no changes."""

    def train(worker: Member) -> None:
        announce(worker, [2, 3, 4])
        wait_for_prefetch(worker)
        for _ in range(2):
            step(worker, torch.tensor([[1, 2, 3]]), torch.ones(1, 1))
        announce(worker)
        assert np.array_equal(read(worker, 2, 3, 4), worker.rows([2, 3, 4]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 0

    run(build, train, workers=1)


def test_rows_of_the_current_batch_are_stale_after_its_step() -> None:
    def train(worker: Member) -> None:
        announce(worker, [1, 2, 3])
        announce(worker)
        for _ in range(2):
            step(worker, torch.tensor([[1, 2, 3]]), torch.ones(1, 1))
            assert np.array_equal(read(worker, 1, 2, 3), worker.rows([1, 2, 3]))
        assert worker.communicator.metrics()["rows_read_ahead"] == 3

    run(build, train, workers=1)


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

    run(build, train, workers=1)


def test_a_prefetched_batch_that_is_not_trained_creates_no_rows() -> None:
    def train(worker: Member) -> Any:
        announce(worker, [7, 8, 9])
        wait_for_prefetch(worker)
        step(worker, torch.tensor([[1, 2, 3]]), torch.ones(1, 1))
        return [counted.rows for counted in worker.session.client.metrics()]

    assert run(build, train, workers=1) == [[{"emb": 3}]]


def test_tables_with_an_admission_rule_are_not_prefetched() -> None:
    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        announce(worker)
        read(worker, 1, 2, 3)
        return worker.communicator.metrics()

    def counted() -> Any:
        return build(entry=CountFilterEntry(2))

    assert "rows_read_ahead" not in run(counted, train, workers=1)[0]


def test_rows_changed_during_a_barrier_are_fetched_again() -> None:
    """Other workers change rows that this worker prefetched, and no push of its own reports it."""

    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        wait_for_prefetch(worker)
        if worker.index == 1:
            for _ in range(3):
                step(worker, torch.tensor([[1, 2, 3]]), torch.ones(1, 1))
        worker.barrier()
        announce(worker)
        return read(worker, 1, 2, 3), worker.rows([1, 2, 3])

    for found, on_demand in run(build, train):
        assert np.array_equal(found, on_demand)


def test_rows_are_right_after_a_refused_step() -> None:
    def train(worker: Member) -> None:
        announce(worker, [*range(9)])
        wait_for_prefetch(worker)
        worker.optimizer.zero_grad()
        loss_of(worker.model, torch.arange(9).view(3, 3), torch.ones(3, 1)).backward()
        grad: Any = worker.model.emb.weight.grad  # type: ignore[union-attr]
        grad.parts[0].gradients[-1] = np.nan  # on the last server
        with pytest.raises(GradientError, match="emb"):
            worker.optimizer.step()
        announce(worker)
        assert np.array_equal(read(worker, *range(9)), worker.rows(range(9)))

    run(build, train, workers=1, servers=3)


def test_stale_rows_are_not_read() -> None:
    """With staleness 0, rows prefetched before a step of this worker lack that step."""

    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        wait_for_prefetch(worker)
        step(worker, torch.tensor([[1, 2, 3]]), torch.ones(1, 1))
        announce(worker)
        return np.array_equal(read(worker, 1, 2, 3), worker.rows([1, 2, 3]))

    strict = {"a_sync": True, "a_sync_configs": {"staleness": 0}}
    assert run(build, train, strict, workers=1) == [True]


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

    assert run(build, train, workers=1, servers=2) == [(3, 3)]


def test_async_reads_prefetched_rows_with_newer_dense_values() -> None:
    def train(worker: Member) -> Any:
        announce(worker, [1, 2, 3])
        wait_for_prefetch(worker)
        old = worker.rows([1, 2, 3])
        step(worker, torch.tensor([[1, 2, 3]]), torch.ones(1, 1))
        worker.communicator.flush()
        announce(worker)
        worker.communicator.refresh()
        assert np.array_equal(read(worker, 1, 2, 3), old)
        return worker.communicator.versions

    # the version of a server with dense values is that of the dense values
    assert run(build, train, ASYNC, workers=1) == [[1]]


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

    [(rows, _)] = run(build_shared, train(False), workers=1, servers=2)
    [(rows_, ahead)] = run(build_shared, train(True), workers=1, servers=2)
    assert np.array_equal(rows, rows_)
    assert ahead == 6
