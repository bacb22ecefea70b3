# SPDX-License-Identifier: Apache-2.0
"""Async communicator: the send queue of a worker, merging, and bounded staleness."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.workplace import wait_until
from tests.ps.gates import Gate
from tests.served import ASYNC, Job, Member, Net, batches, loss_of, run, started
from torch import nn

from fleetlight.errors import DeadlineError, GradientError, PeerLostError
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker.communicator.async_ import merged
from fleetlight.ps.worker.connections import PUSH
from fleetlight.ps.worker.push_request import PushRequest

ROWS = 30


def settings(**configs: Any) -> dict[str, Any]:
    return {"a_sync": True, "a_sync_configs": configs}


def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.1)]


def step(worker: Member, ids: Any, target: Any = None, factor: float = 1.0) -> None:
    worker.optimizer.zero_grad()
    target = torch.ones(len(ids), 1) if target is None else target
    (loss_of(worker.model, ids, target) * factor).backward()
    worker.optimizer.step()


ONE = torch.tensor([[1, 2, 3]])


def test_a_single_worker_that_flushes_equals_plain_torch() -> None:
    ids, targets = batches(20, 1, ids=ROWS)

    def train(worker: Member) -> Any:
        for t in range(20):
            step(worker, ids[t, 0], targets[t, 0])
            worker.communicator.flush()
        return worker.rows(range(ROWS))

    torch.manual_seed(0)
    model = Net(rows=ROWS)
    with torch.no_grad():
        model.emb.weight.copy_(started(ROWS, 4))  # type: ignore[operator,union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for t in range(20):
        optimizer.zero_grad()
        loss_of(model, ids[t, 0], targets[t, 0]).backward()
        optimizer.step()
    [rows] = run(build, train, ASYNC, workers=1, servers=2)
    np.testing.assert_allclose(rows, model.emb.weight.detach(), rtol=1e-5, atol=1e-7)  # type: ignore[arg-type,union-attr]


def test_the_queue_is_bounded() -> None:
    """A worker blocks on a full queue until the sender takes a push."""

    def train(worker: Member) -> Any:
        gate = Gate(worker.session.client, PUSH, "send")
        step(worker, ONE)
        gate.wait()
        blocked = threading.Thread(target=lambda: [step(worker, ONE) for _ in range(6)])
        blocked.start()
        communicator = worker.communicator
        wait_until(lambda: communicator.metrics()["longest_push_queue"] == 2, "a full queue")
        blocked.join(0.3)
        assert blocked.is_alive()
        gate.open()
        blocked.join(20)
        worker.communicator.flush()
        return worker.communicator.metrics()

    [metrics] = run(build, train, settings(send_queue_size=2), workers=1)
    assert (metrics["steps"], metrics["pushes"], metrics["longest_push_queue"]) == (7, 7, 2)
    assert metrics["push_wait_seconds"] > 0


def test_a_push_is_sent_after_the_reply_to_the_previous_one() -> None:
    """Meanwhile the worker sees its own progress."""

    def train(worker: Member) -> Any:
        dense = worker.session.local_parameters.flat
        gate = Gate(worker.session.client, PUSH, "receive")
        first = dense(0).copy()
        step(worker, ONE)
        gate.wait()
        assert not np.array_equal(dense(0), first)
        second = threading.Thread(target=step, args=(worker, ONE))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        gate.open()
        second.join(20)
        worker.communicator.flush()
        return worker.communicator.metrics(), worker.session.client.metrics()

    [(metrics, counted)] = run(build, train, settings(), workers=1, is_local=False)
    assert (metrics["pushes"], metrics["longest_push_queue"]) == (2, 1)
    assert counted[0].staleness == {0: 1, 1: 1}


def test_acknowledged_steps_are_counted() -> None:
    def train(worker: Member) -> Any:
        counted = worker.communicator
        step(worker, ONE)
        counted.flush()
        steps = [(counted.made, counted.acknowledged)]
        first = Gate(worker.session.client, PUSH, "receive")
        step(worker, ONE)
        first.wait()
        second = Gate(worker.session.client, PUSH, "send")
        for _ in range(2):
            step(worker, ONE)
        steps.append((counted.made, counted.acknowledged))
        first.open()
        second.wait()
        counted.refresh()
        steps.append((counted.made, counted.acknowledged))
        second.open()
        counted.flush()
        return [*steps, (counted.made, counted.acknowledged)]

    [steps] = run(build, train, settings(send_queue_size=4, max_merge=2), workers=1)
    assert steps == [(1, 1), (4, 1), (4, 2), (4, 4)]


def merging(max_merge: int) -> tuple[Any, dict[str, float], int]:
    """Five steps, of which the last four queue up while the first is held."""

    def train(worker: Member) -> Any:
        gate = Gate(worker.session.client, PUSH, "send")
        for t in range(5):
            step(worker, ONE + t % 2)
            if t == 0:
                gate.wait()
        gate.open()
        worker.communicator.flush()
        [counted] = worker.session.client.metrics()
        return worker.rows([1, 2, 3, 4]), worker.communicator.metrics(), counted.pushes

    result: Any = run(build, train, settings(send_queue_size=4, max_merge=max_merge), workers=1)[0]
    return result


def test_queued_pushes_are_merged_and_count_as_one() -> None:
    rows, metrics, pushes = merging(3)
    assert (metrics["pushes"], metrics["merged_pushes"], pushes) == (3, 2, 3)
    # SGD does not tell a sum from its parts
    single, metrics, pushes = merging(1)
    assert (metrics["pushes"], metrics["merged_pushes"], pushes) == (5, 0, 5)
    np.testing.assert_allclose(rows, single, rtol=1e-6)


def test_merging_sums_gradients_and_keeps_the_last_options() -> None:
    def request_of(
        ids: list[int], value: float, absent: list[int], dense: Any, **of: Any
    ) -> PushRequest:
        part = TableGradients(
            np.array(ids),
            np.array([0, len(ids)]),
            np.full((len(ids), 2), value, np.float32),
            shows=np.ones(len(ids), np.float32),
            clicks=np.zeros(len(ids), np.float32),
        )
        return PushRequest(
            0, of["step"], [{"lr": value}], {0: part}, {0: [dense]}, absent, seen=(7,)
        )

    bits = torch.tensor([1.0, 2.0], dtype=torch.bfloat16).view(torch.uint16).numpy
    first = request_of([1, 2], 1.0, [0, 1], bits().copy(), step=3)
    second = request_of([2, 3], 10.0, [1], bits().copy(), step=4)
    total = merged([first, second], 1)
    assert (total.step, total.options, total.absent, total.merged) == (4, [{"lr": 10.0}], [1], 2)
    assert total.seen == (7,)
    found = {
        int(i): float(g[0])
        for i, g in zip(total.tables[0].ids, total.tables[0].gradients, strict=True)
    }
    assert found == {1: 1.0, 2: 11.0, 3: 10.0}
    assert total.tables[0].shows is not None
    assert sorted(total.tables[0].shows.tolist()) == [1, 1, 2]
    doubled = torch.from_numpy(total.blocks[0][0]).view(torch.bfloat16)
    assert doubled.tolist() == [2.0, 4.0]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_bounded_staleness_waits_for_the_slowest_worker(ahead: bool) -> None:
    """Worker 1 makes no step, so worker 0 may read for steps 0 to 2, but not for step 3."""
    timed_out = threading.Event()

    def steps(worker: Member) -> None:
        for _ in range(9):
            if ahead:
                worker.communicator.announce([{0: ONE.reshape(-1).numpy()}])
            step(worker, ONE)

    def train(worker: Member) -> Any:
        if worker.index == 1:
            assert timed_out.wait(20)
            return None
        with pytest.raises(DeadlineError, match=r"after 1 steps of every worker.* worker 1"):
            steps(worker)
        timed_out.set()
        return worker.communicator.steps

    job = Job(build, settings(staleness=2), workers=2, servers=2, deadline_s=0.5)
    assert job.tried(train)[0] == 3


def test_a_worker_that_ends_its_phase_is_not_awaited() -> None:
    def train(worker: Member) -> Any:
        for _ in range(2 if worker.index else 12):
            step(worker, ONE)
        worker.barrier()
        step(worker, ONE)
        worker.communicator.flush()
        return worker.communicator.metrics()["steps"]

    assert run(build, train, settings(staleness=1)) == [13, 3]


@pytest.mark.parametrize("staleness", [None, 0])
def test_a_skipped_step_counts_as_a_step(staleness: int | None) -> None:
    """Otherwise a worker would wait for its own missing steps; a skip is not merged."""

    def train(worker: Member) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        worker.context.scalers.append(scaler)
        gate = Gate(worker.session.client, PUSH, "send")
        if staleness is not None:
            gate.open()
        for factor in (float("inf"), 1.0, float("inf"), 1.0):
            worker.optimizer.zero_grad()
            scaler.scale(loss_of(worker.model, ONE, torch.ones(1, 1)) * factor).backward()
            scaler.step(worker.optimizer)
            scaler.update()
        gate.open()
        worker.communicator.flush()
        return [counted.pushes for counted in worker.session.client.metrics()]

    assert run(build, train, settings(staleness=staleness, max_merge=4), workers=1) == [[2]]


def test_an_error_of_the_sender_is_raised_by_later_calls() -> None:
    def train(worker: Member) -> None:
        stepped = threading.Event()

        def fail(*_: Any, **__: Any) -> Any:
            assert stepped.wait(20)
            raise PeerLostError("server 0 is gone")

        worker.session.client.push = fail  # type: ignore[method-assign]
        step(worker, ONE)
        stepped.set()
        with pytest.raises(PeerLostError, match="server 0 is gone"):
            worker.communicator.flush()
        with pytest.raises(PeerLostError, match="server 0 is gone"):
            step(worker, ONE)
        raise KeyError("over")

    with pytest.raises(KeyError):
        run(build, train, ASYNC, workers=1, is_local=False)


def test_an_error_of_the_push_in_flight_is_raised_by_later_calls() -> None:
    """Its gradients are lost, so no step may follow."""

    def train(worker: Member) -> None:
        gate = Gate(worker.session.client, PUSH, "receive")
        gate.open()
        step(worker, ONE)

        def fail(*_: Any) -> Any:
            raise PeerLostError("server 0 is gone")

        gate.receive = fail  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(PeerLostError, match="server 0 is gone"):
                step(worker, ONE)
        with pytest.raises(PeerLostError, match="server 0 is gone"):
            worker.communicator.flush()
        raise KeyError("over")

    with pytest.raises(KeyError):
        run(build, train, ASYNC, workers=1)


def test_the_reply_to_a_push_is_received_by_the_next_step() -> None:
    """Servers on this host: no thread, and one push in flight."""

    def train(worker: Member) -> Any:
        gate = Gate(worker.session.client, PUSH, "receive")
        step(worker, ONE)
        counts = [(worker.communicator.made, worker.communicator.acknowledged)]
        gate.open()
        step(worker, ONE)
        counts.append((worker.communicator.made, worker.communicator.acknowledged))
        worker.communicator.flush()
        counts.append((worker.communicator.made, worker.communicator.acknowledged))
        assert "fleet-push" not in [thread.name for thread in threading.enumerate()]
        return counts, worker.communicator.metrics()["pushes"]

    assert run(build, train, ASYNC, workers=1) == [([(1, 0), (2, 1), (2, 2)], 2)]


@pytest.mark.parametrize("staleness", [None, 0])
def test_nan_is_refused_before_anything_is_sent(staleness: int | None) -> None:
    """A script that catches the error can repeat the step."""

    def train(worker: Member) -> Any:
        with pytest.raises(GradientError, match=r"worker 0 computed .*'emb'.* applied anywhere"):
            step(worker, ONE, factor=float("nan"))
        step(worker, ONE)
        step(worker, ONE)
        worker.communicator.flush()
        return [counted.pushes for counted in worker.session.client.metrics()]

    strategy = settings(staleness=staleness, max_merge=1)
    assert run(build, train, strategy, workers=1, servers=2) == [[2, 2]]


def test_nan_may_be_skipped() -> None:
    def train(worker: Member) -> Any:
        step(worker, ONE, factor=float("nan"))
        worker.communicator.flush()
        return worker.rows([1])

    [rows] = run(build, train, settings(on_nonfinite="skip"), workers=1)
    np.testing.assert_array_equal(rows[0], started(2, 4)[1])


def test_other_workers_learn_of_a_lost_worker() -> None:
    lost = threading.Event()

    def train(worker: Member) -> Any:
        if worker.index == 1:
            worker.session.client.close()
            lost.set()
            raise KeyError("gone")
        assert lost.wait(20)
        for _ in range(3):
            step(worker, ONE)
            worker.communicator.flush()
        return None

    error = Job(build, ASYNC, workers=2, servers=1).tried(train)[0]
    assert isinstance(error, PeerLostError)
    assert "worker 1" in str(error)


def test_a_barrier_gives_all_workers_the_same_values() -> None:
    ids, targets = batches(10, 2, ids=ROWS)

    def train(worker: Member) -> Any:
        for t in range(10):
            step(worker, ids[t, worker.index], targets[t, worker.index])
        worker.barrier()
        with torch.no_grad():
            return worker.model(ids[0, 0])

    first, second = run(build, train, settings(max_merge=3), servers=2)
    assert torch.equal(first, second)


def test_gradients_are_clipped_per_worker() -> None:
    def train(worker: Member) -> Any:
        worker.optimizer.zero_grad()
        loss_of(worker.model, ONE, torch.ones(1, 1)).backward()
        assert worker.clip(1e-3) > 1e-3
        worker.optimizer.step()
        worker.barrier()
        return worker.rows([1, 2, 3]), [
            p.detach().clone() for p in worker.model.linear.parameters()
        ]  # type: ignore[union-attr]

    [(rows, dense)] = run(build, train, ASYNC, workers=1, servers=2)
    torch.manual_seed(0)
    before = list(Net().linear.parameters())
    moved = [
        rows - started(4, 4)[1:].numpy(),
        *((a - b).detach() for a, b in zip(dense, before, strict=True)),
    ]
    total = sum(float((np.asarray(m, np.float64) ** 2).sum()) for m in moved) ** 0.5
    assert total == pytest.approx(0.1 * 1e-3, rel=1e-3)
