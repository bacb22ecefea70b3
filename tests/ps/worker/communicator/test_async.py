# SPDX-License-Identifier: Apache-2.0
"""Async jobs, and what every communicator owes its group."""

import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.workplace import wait_until
from tests.ps.gates import Gate
from tests.ps.serving import plan
from tests.served import ASYNC, SYNC, Job, Member, Net, batches, geo, loss_of, run, started
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.errors import DeadlineError, GradientError, PeerLostError
from fleetlight.kernels import RULES
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import DensePlan
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker.communicator.async_ import LocalDense, merged
from fleetlight.ps.worker.connections import PUSH
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.reply_values import ReplyValues

# Async communicator: the send queue of a worker, merging, and bounded staleness.


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
    total = merged([first, request_of([2, 3], 10.0, [1], bits().copy(), step=4)], 1)
    assert (total.step, total.options, total.absent, total.merged) == (4, [{"lr": 10.0}], [1], 2)
    assert total.seen == (7,)
    found = {
        int(i): float(g[0])
        for i, g in zip(total.tables[0].ids, total.tables[0].gradients, strict=True)
    }
    assert found == {1: 1.0, 2: 11.0, 3: 10.0}
    assert total.tables[0].shows is not None
    assert sorted(total.tables[0].shows.tolist()) == [1, 1, 2]
    assert torch.from_numpy(total.blocks[0][0]).view(torch.bfloat16).tolist() == [2.0, 4.0]


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


# LocalDense: dense parameters that workers step themselves, on servers and on a worker.


WORKERS = 3
PLANS = {
    dtype: plan("async", WORKERS, dense=[DensePlan("weight", (2,), dtype, 0, 0)])
    for dtype in ("float32", "float64")
}
# kernels handle float32, torch the others
every_dtype = pytest.mark.parametrize("dtype", PLANS)


class Server:
    """Adds a share and replies with the sum."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.values = np.ones(2, dtype)

    def add(self, shares: dict[int, Any]) -> ReplyValues:
        for share in shares.get(0, []):
            self.values = self.values + share
        return ReplyValues(dense={0: [self.values.copy()]})


class Worker:
    """A worker that receives its replies in order, when the test says so."""

    def __init__(self, server: Server) -> None:
        self.weight = torch.ones(2, dtype=getattr(torch, server.dtype))
        of = PLANS[server.dtype]
        client: Any = types.SimpleNamespace(
            active=WORKERS, server_num=1, plan=of, placement=Placement(of)
        )
        self.server, self.dense = server, LocalDense(client, LocalParameters([self.weight]))
        self.dense.begin()
        self.replies: deque[ReplyValues] = deque()

    def push(self, *, just_taken: bool = False) -> None:
        self.replies.append(self.server.add(self.dense.share(0, just_taken=just_taken)))

    def receive(self, count: int = 1) -> None:
        for _ in range(count - 1):
            self.replies.popleft()
        self.dense.take(self.replies.popleft(), count)


@every_dtype
def test_own_progress_counts_in_full_until_its_reply(dtype: str) -> None:
    server = Server(dtype)
    first, second = Worker(server), Worker(server)
    first.weight += 3
    first.push()
    assert first.weight.tolist() == [4, 4]
    second.weight += 6
    second.push()
    first.weight += 1
    first.receive()
    # the mean of all progress up to its push, and its own progress since
    assert first.weight.tolist() == [1 + 3 / 3 + 1] * 2
    second.receive()
    assert second.weight.tolist() == [1 + 3 / 3 + 6 / 3] * 2


@every_dtype
def test_pushes_without_a_reply_stay_on_top_of_server_values(dtype: str) -> None:
    worker = Worker(Server(dtype))
    for learned in (3, 6, 9):
        worker.weight += learned
        worker.push()
    worker.receive(2)
    assert worker.weight.tolist() == [1 + (3 + 6) / 3 + 9] * 2
    worker.receive()
    assert worker.weight.tolist() == [1 + (3 + 6 + 9) / 3] * 2


@every_dtype
def test_a_share_is_written_in_the_memory_of_its_server(dtype: str) -> None:
    worker, memory = Worker(Server(dtype)), np.zeros(2, dtype)
    worker.weight += 3
    shares = worker.dense.share(0, memory=[lambda shape, dtype: memory])
    assert np.may_share_memory(shares[0][0], memory)
    assert memory.tolist() == [1, 1]


@every_dtype
def test_a_skipped_push_adds_nothing(dtype: str) -> None:
    worker = Worker(Server(dtype))
    worker.dense.skipped()
    worker.replies.append(worker.server.add({}))
    worker.weight += 3
    worker.push()
    worker.receive()
    assert worker.weight.tolist() == [4, 4]


@every_dtype
@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.sampled_from("lphb")), max_size=60))
def test_all_workers_converge_to_the_mean_of_all_progress(
    dtype: str, operations: list[tuple[int, str]]
) -> None:
    server = Server(dtype)
    workers, learned = [Worker(server) for _ in range(WORKERS)], 0
    for number, operation in operations:
        worker = workers[number]
        if operation == "l":
            worker.weight += number + 1
            learned += number + 1
        elif operation == "p":
            worker.push()
        elif worker.replies:
            worker.receive()
            if operation == "b":
                worker.push(just_taken=True)
    for worker in workers:
        worker.push()
    for worker in workers:
        worker.receive(len(worker.replies))
    np.testing.assert_allclose(server.values, 1 + learned / WORKERS, rtol=1e-5)
    np.testing.assert_allclose(workers[-1].weight.numpy(), server.values, rtol=1e-5)


# Each rule trains in a job as its optimizer does alone, with the options of each param group.


GROUP_ROWS, GROUP_DIM, GROUP_STEPS = 12, 4, 12
TABLES = ("first", "second")
Make = Callable[[Any], torch.optim.Optimizer]


class TwoTables(nn.Module):
    """Two tables in param groups of their own; `moved`: torch's layers."""

    def __init__(self, moved: bool = False) -> None:
        super().__init__()
        for name in TABLES:
            layer = nn.Embedding(GROUP_ROWS, GROUP_DIM) if moved else SparseEmbedding(GROUP_DIM)
            self.add_module(name, layer)
        self.linear = nn.Linear(6 * GROUP_DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        both = [self.get_submodule(name)(ids) for name in TABLES]
        out: Tensor = self.linear(torch.cat(both, -1).flatten(1))
        return out


def groups_of(model: nn.Module, first: dict[str, Any], second: dict[str, Any]) -> Any:
    options = dict(zip((*TABLES, "linear"), (first, second, {}), strict=True))
    return [
        {"params": model.get_submodule(name).parameters(), **one} for name, one in options.items()
    ]


#: the options of the first and of the second table
DECAY = {"lr": 0.05, "weight_decay": 0.02}, {"lr": 0.01, "weight_decay": 0.5}
FTRL = {"lr": 0.2, "l1": 0.001, "l2": 0.01}, {"lr": 0.05, "beta": 0.1, "l2": 1.0}
CASES: dict[str, tuple[Make, Any]] = {
    "sgd": (lambda groups: torch.optim.SGD(groups, 0.1), DECAY),
    "momentum": (lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9), DECAY),
    # the rule adds eps where SparseAdam does, so eps must not matter
    "adam": (lambda groups: torch.optim.Adam(groups, 0.01, eps=1e-12), DECAY),
    "adamw": (lambda groups: torch.optim.AdamW(groups, 0.01, eps=1e-5), DECAY),
    "rowwise_adam": (lambda groups: fleet.optim.RowwiseAdam(groups, 0.01, eps=1e-5), DECAY),
    "ftrl": (lambda groups: fleet.optim.Ftrl(groups, 0.1), FTRL),
    "adagrad": (lambda groups: torch.optim.Adagrad(groups, 0.05), DECAY),
    "rowwise_adagrad": (lambda groups: fleet.optim.RowwiseAdagrad(groups, 0.05), DECAY),
}


def every_row(ids: Tensor) -> Tensor:
    """Ids of which each batch has every row: decay then acts on all rows, as in dense training."""
    ids[:, :, :4] = torch.arange(GROUP_ROWS).view(4, 3)
    return ids


def build_of(name: str) -> Callable[[], Any]:
    make, options = CASES[name]

    def build() -> Any:
        model = TwoTables()
        return model, [make(groups_of(model, *options))]

    return build


def alone(name: str, ids: Tensor, targets: Tensor) -> list[Tensor]:
    """The values after training dense parameters in plain torch."""
    torch.manual_seed(0)
    model = TwoTables(moved=True)
    with torch.no_grad():
        for table in TABLES:
            model.get_parameter(f"{table}.weight").copy_(started(GROUP_ROWS, GROUP_DIM, table))
    make, options = CASES[name]
    # the layers of torch have drawn random numbers before the linear one
    torch.manual_seed(0)
    model.linear = nn.Linear(6 * GROUP_DIM, 1)
    optimizer = make(groups_of(model, *options))
    for t in range(len(ids)):
        optimizer.zero_grad()
        loss_of(model, ids[t].flatten(0, 1), targets[t].flatten(0, 1)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_on(ids: Tensor, targets: Tensor) -> Callable[[Member], list[Tensor]]:
    def train(worker: Member) -> list[Tensor]:
        strategy = worker.context.strategy
        for t in range(len(ids)):
            worker.optimizer.zero_grad()
            loss_of(worker.model, ids[t, worker.index], targets[t, worker.index]).backward()
            worker.optimizer.step()
            if strategy.a_sync and not strategy.a_sync_configs.k_steps:
                # without staleness
                worker.barrier()
        worker.barrier()
        rows = [torch.from_numpy(worker.rows(range(GROUP_ROWS), number)) for number in range(2)]
        linear = worker.model.get_submodule("linear")
        return [*rows, *(p.detach().clone() for p in linear.parameters())]

    return train


def test_each_rule_of_an_optimizer_is_tested() -> None:
    assert set(CASES) == {name for name, rule in RULES.items() if rule.optimizers}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sync_training_equals_one_process(name: str) -> None:
    ids, targets = batches(GROUP_STEPS, 2, ids=GROUP_ROWS)
    expected = alone(name, every_row(ids), targets)
    for found in run(build_of(name), train_on(ids, targets), SYNC, servers=2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ASYNC, geo(3)], ids=["async", "geo"])
@pytest.mark.parametrize("name", ["adamw", "rowwise_adam", "ftrl"])
def test_a_single_worker_equals_one_process_in_other_modes(name: str, mode: Any) -> None:
    ids, targets = batches(GROUP_STEPS, 1, ids=GROUP_ROWS)
    expected = alone(name, every_row(ids), targets)
    [found] = run(build_of(name), train_on(ids, targets), mode, workers=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_decay_acts_on_the_rows_of_a_push_only() -> None:
    def build() -> Any:
        model = TwoTables()
        return model, [torch.optim.AdamW(model.parameters(), 0.1, weight_decay=5.0)]

    def train(worker: Member) -> Tensor:
        worker.model(torch.arange(6).view(2, 3)).sum().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        before = worker.rows(range(6))
        (worker.model(torch.arange(3)[None]) * 0).sum().backward()
        worker.optimizer.step()
        worker.barrier()
        return torch.from_numpy(worker.rows(range(6)) != before).any(1)

    [moved] = run(build, train, SYNC, workers=1)
    assert moved.tolist() == [True] * 3 + [False] * 3
