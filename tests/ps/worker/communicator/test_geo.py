# SPDX-License-Identifier: Apache-2.0
"""GeoSGD: workers train their own rows and send differences."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.ps.gates import Gate
from tests.ps.made_tables import table_plan
from tests.served import Member, Net, batches, geo, loss_of, run, started
from torch import Tensor, nn

from fleetlight.errors import GradientError
from fleetlight.kernels import Deduped, dedup
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker.client import Wanted
from fleetlight.ps.worker.communicator import geo as geo_module
from fleetlight.ps.worker.communicator.geo import LocalRows
from fleetlight.ps.worker.connections import PUSH
from fleetlight.ps.worker.joint_reads import read_together

# GeoSGD communicator: its formulas, step by step against a simulation.


LR, DIM, IDS = 0.3, 2, 12


class Attraction(nn.Module):
    """A model whose loss pulls each row and a dense parameter towards a target."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = SparseEmbedding(DIM)
        self.bias = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))

    def forward(self, ids: Tensor, target: float) -> Tensor:
        rows = ((self.emb(ids) - target) ** 2).sum()
        return 0.5 * rows + 0.5 * ((self.bias - target) ** 2).sum()


def build() -> Any:
    model = Attraction()
    return model, [torch.optim.SGD(model.parameters(), lr=LR)]


class SimulatedWorker:
    """A worker as the formulas define it; all workers share `servers`."""

    def __init__(self, servers: dict[Any, Any], workers: int) -> None:
        self.servers, self.workers = servers, workers
        self.live = {"bias": servers["bias"].copy()}
        self.old = {"bias": servers["bias"].copy()}
        self.last: dict[Any, int] = {}
        self.window = 1
        self.sent: list[Any] = []

    def step(self, ids: list[int], target: float) -> None:
        for key in dict.fromkeys(ids):
            self.touch(key)
        for key in [*ids, "bias"]:
            self.moves[key] = self.moves.get(key, 0) + 1
        for key, times in self.moves.items():
            self.live[key] = self.live[key] - LR * times * (self.live[key] - target)
        self.moves.clear()

    moves: dict[Any, int] = {}  # noqa: RUF012

    def touch(self, key: int) -> None:
        if key not in self.live:
            self.live[key] = self.old[key] = self.servers[key].copy()
        elif self.last[key] < self.window - geo_module.KEPT_WINDOWS:
            self.live[key] = self.live[key] + self.servers[key] - self.old[key]
            self.old[key] = self.servers[key].copy()
        self.last[key] = self.window

    def send(self) -> dict[Any, Any]:
        """Push the differences; return the values of the servers after it."""
        mine = ["bias", *(key for key, window in self.last.items() if window == self.window)]
        for key in mine:
            share = (self.live[key] - self.old[key]) / self.workers
            self.old[key] = self.old[key] + share
            self.servers[key] = self.servers[key] + share
        self.window += 1
        return {key: self.servers[key].copy() for key in mine}

    def take(self, reply: dict[Any, Any]) -> None:
        for key, now in reply.items():
            self.live[key] = self.live[key] + now - self.old[key]
            self.old[key] = now

    def rest(self) -> None:
        for key in self.live:
            self.servers[key] = self.servers[key] + (self.live[key] - self.old[key]) / self.workers


def simulation(workers: int) -> tuple[dict[Any, Any], list[SimulatedWorker]]:
    rows = started(IDS, DIM).numpy().astype(np.float64)
    servers: dict[Any, Any] = {key: rows[key] for key in range(IDS)}
    servers["bias"] = np.array([1.0, -1.0, 2.0])
    return servers, [SimulatedWorker(servers, workers) for _ in range(workers)]


def step(worker: Member, ids: list[int], target: float) -> None:
    worker.optimizer.zero_grad()
    worker.model(torch.tensor(ids), target).backward()
    worker.optimizer.step()


def assert_same(worker: Member, simulated: SimulatedWorker) -> None:
    """Compare live values without touching any row."""
    tables: Any = worker.communicator
    local = tables._tables[0]
    for key in simulated.live:
        if key == "bias":
            got: Any = worker.model.bias.detach().numpy()  # type: ignore[operator,union-attr]
        else:
            got = local._rows.pull([key], insert=False)[0]
        np.testing.assert_allclose(got, simulated.live[key], rtol=1e-5, atol=1e-6)


#: some ids repeat at once, some after windows without them
SEQUENCE = [
    [0, 1, 2],
    [0, 3, 0],
    [4, 1, 5],
    [4, 6, 7],
    [8, 9, 8],
    [0, 1, 4],
    [10, 11, 0],
    [2, 3, 6],
]


@pytest.mark.slow
@pytest.mark.parametrize("servers", [2, 1])
@pytest.mark.parametrize(("k", "kept_windows"), [(2, 1), (1, 1), (1, 3), (1, 100)])
def test_training_follows_the_formulas(
    k: int, kept_windows: int, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers take turns, so that the order of exchanges is known."""
    monkeypatch.setattr(geo_module, "KEPT_WINDOWS", kept_windows)
    expected, simulated = simulation(2)
    turn = [threading.Semaphore(1), threading.Semaphore(0)]
    both = threading.Barrier(2, timeout=20)

    def train(worker: Member) -> Any:
        index = worker.index
        both.wait()
        for t, ids in enumerate(SEQUENCE):
            assert turn[index].acquire(timeout=20)
            mine, target = [(key + 2 * index) % IDS for key in ids], float(t - 3 * index)
            step(worker, mine, target)
            worker.communicator.flush()
            simulated[index].step(mine, target)
            if (t + 1) % k == 0:
                simulated[index].take(simulated[index].send())
            assert_same(worker, simulated[index])
            turn[1 - index].release()
        both.wait()
        worker.barrier()
        return worker.rows(range(IDS)), worker.model.bias.detach().clone()  # type: ignore[operator,union-attr]

    results = run(build, train, geo(k), servers=servers)
    for worker in simulated:
        worker.rest()
    for rows, bias in results:
        np.testing.assert_allclose(
            rows, [expected[key] for key in range(IDS)], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(bias, expected["bias"], rtol=1e-5, atol=1e-6)


def test_progress_during_an_exchange_is_kept() -> None:
    _, [simulated] = simulation(1)

    def train(worker: Member) -> None:
        gate = Gate(worker.session.client, PUSH, "receive")
        step(worker, [0, 1, 0], 1.0)
        step(worker, [2, 1, 0], 2.0)
        gate.wait()
        step(worker, [1, 3, 0], 3.0)
        gate.open()
        communicator: Any = worker.communicator
        communicator._exchange.exception(20)
        communicator.refresh()
        assert communicator._exchange is None
        for t, ids in enumerate([[0, 1, 0], [2, 1, 0], [1, 3, 0]]):
            if t == 2:
                reply = simulated.send()
            simulated.step(ids, float(t + 1))
        simulated.take(reply)
        assert_same(worker, simulated)

    run(build, train, geo(2), workers=1)


def test_settling_twice_pushes_progress_once() -> None:
    def train(worker: Member) -> Any:
        communicator, client = worker.communicator, worker.session.client
        found = []
        if worker.index == 0:
            step(worker, [0, 1], 1.0)
            for _ in range(2):
                communicator.settle()
                found.append(client.pull([], dense=True).dense[0][0].copy())
            communicator.resume()
            step(worker, [0, 1], 1.0)
            communicator.settle()
            found.append(client.pull([], dense=True).dense[0][0].copy())
            communicator.resume()
        return found

    [(once, twice, later), _] = run(build, train, geo(5), workers=2)
    np.testing.assert_array_equal(once, twice)
    assert not np.array_equal(later, twice)


def test_an_exchange_waits_for_the_one_before_it() -> None:
    def train(worker: Member) -> Any:
        gate = Gate(worker.session.client, PUSH, "receive")
        step(worker, [0, 1], 1.0)
        gate.wait()
        threading.Timer(0.05, gate.open).start()
        step(worker, [1, 2], 1.0)
        return worker.communicator.metrics()

    [metrics] = run(build, train, geo(1), workers=1)
    assert metrics["exchanges"] == 2
    assert metrics["push_wait_seconds"] > 0


def test_a_barrier_leaves_all_workers_equal() -> None:
    def train(worker: Member) -> Any:
        for t in range(5 + worker.index):
            step(worker, [t, t + worker.index], float(worker.index))
        worker.barrier()
        with torch.no_grad():
            rows = worker.model.emb(torch.arange(IDS))  # type: ignore[operator,union-attr]
        return rows, worker.model.bias.detach().clone()  # type: ignore[operator,union-attr]

    (rows, bias), (rows_, bias_) = run(build, train, geo(3), servers=2)
    assert torch.equal(rows, rows_)
    assert torch.equal(bias, bias_)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_single_worker_equals_plain_torch() -> None:
    """For any k, a single worker receives its own differences unchanged."""
    ids, targets = batches(30, 1)

    def net() -> Any:
        model = Net()
        return model, [torch.optim.Adagrad(model.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        for t in range(30):
            worker.optimizer.zero_grad()
            loss_of(worker.model, ids[t, 0], targets[t, 0]).backward()
            if t == 20:
                worker.clip(0.01)
            worker.optimizer.step()
        worker.barrier()
        return worker.rows(range(30)), [p.detach() for p in worker.model.linear.parameters()]  # type: ignore[union-attr]

    torch.manual_seed(0)
    model = Net(rows=30)
    with torch.no_grad():
        model.emb.weight.copy_(started(30, 4))  # type: ignore[operator,union-attr]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for t in range(30):
        optimizer.zero_grad()
        loss_of(model, ids[t, 0], targets[t, 0]).backward()
        if t == 20:
            gradient = model.emb.weight.grad.coalesce()  # type: ignore[operator,union-attr]
            parts = [gradient.values(), *(p.grad for p in model.linear.parameters())]
            total = torch.stack([part.norm() for part in parts]).norm()  # type: ignore[union-attr]
            for part in parts:
                part.mul_(0.01 / (total + 1e-6))  # type: ignore[union-attr]
            model.emb.weight.grad = gradient  # type: ignore[assignment,union-attr]
        optimizer.step()
    [(rows, dense)] = run(net, train, geo(7), workers=1, servers=2)
    np.testing.assert_allclose(rows, model.emb.weight.detach(), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type,union-attr]
    for mine, theirs in zip(dense, model.linear.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_rows_beyond_the_limit_are_evicted_without_loss() -> None:
    def train(worker: Member) -> Any:
        for t in range(20):
            step(worker, [t % IDS, (t + 1) % IDS], 5.0)
            worker.communicator.flush()
        rows = worker.communicator.metrics()["local_rows"]
        worker.barrier()
        return rows, worker.rows(range(IDS))

    [(few_rows, limited)] = run(build, train, geo(1, cache_rows=4), workers=1)
    [(all_rows, unlimited)] = run(build, train, geo(1), workers=1)
    assert few_rows <= 6 < all_rows
    np.testing.assert_allclose(limited, unlimited, rtol=1e-5)


def test_a_refused_difference_is_raised_by_a_later_call() -> None:
    def train(worker: Member) -> None:
        step(worker, [1, 2], float("nan"))
        worker.communicator.flush()

    with pytest.raises(GradientError, match=r"worker 0 sent a difference .* NaN or inf"):
        run(build, train, geo(1), workers=1)


def test_an_infinity_skips_the_step_of_its_worker() -> None:
    def train(worker: Member) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        worker.context.scalers.append(scaler)
        before = worker.model.bias.detach().clone()  # type: ignore[operator,union-attr]
        for factor in (float("inf"), 1.0):
            worker.optimizer.zero_grad()
            scaler.scale(worker.model(torch.tensor([1]), 3.0) * factor).backward()
            scaler.step(worker.optimizer)
            scaler.update()
            if factor != 1.0:
                assert torch.equal(before, worker.model.bias.detach())  # type: ignore[operator,union-attr]
        worker.barrier()
        return worker.rows([1])

    [rows] = run(build, train, geo(5), workers=1)
    first = started(IDS, DIM)[1].numpy()
    np.testing.assert_allclose(rows[0], first - LR * (first - 3.0), rtol=1e-5)


def test_rules_other_than_sgd_log_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def adagrad() -> Any:
        model = Attraction()
        return model, [torch.optim.Adagrad(model.parameters(), lr=LR)]

    do_nothing: Callable[[Member], Any] = lambda worker: None  # noqa: E731
    with caplog.at_level("WARNING", "fleetlight"):
        run(adagrad, do_nothing, geo(2), workers=1)
    assert "emb uses adagrad, whose state each worker computes from its own" in caplog.text


def test_acknowledged_steps_are_counted() -> None:
    def train(worker: Member) -> Any:
        counted, steps = worker.communicator, []
        for _ in range(4):
            worker.optimizer.zero_grad()
            worker.model(torch.tensor([1]), 1.0).backward()
            worker.optimizer.step()
            counted.flush()
            steps.append((counted.made, counted.acknowledged))
        counted.settle()
        return [*steps, (counted.made, counted.acknowledged)]

    [steps] = run(build, train, geo(3), workers=1)
    assert steps == [(1, 0), (2, 0), (3, 3), (4, 3), (4, 4)]


# LocalRows: the rows that a GeoSGD worker caches, without servers.


class Servers:
    """The rows of the servers: each one is a number, three times."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.asked: list[list[int]] = []

    def fetch(self, missing: Deduped) -> Any:
        self.asked.append(sorted(missing.ids.tolist()))
        assert missing.starts[-1] == len(missing.ids)
        return np.array([[self.values.get(int(i), float(i))] * 3 for i in missing.ids], np.float32)


def make(limit: int = 100) -> tuple[LocalRows, Servers]:
    return LocalRows(table_plan(), servers=2, workers=lambda: 2, limit=limit), Servers()


def whole(rows: LocalRows, servers: Servers, wanted: Deduped, keep: bool = True) -> Any:
    def fetch(missing: Sequence[Wanted]) -> Any:
        return [servers.fetch(one.ids) for one in missing]

    [found] = read_together([Wanted(0, wanted, keep)], lambda w: rows.read(w.ids, w.insert), fetch)
    return found


def read(rows: LocalRows, servers: Servers, *ids: int, keep: bool = True) -> list[float]:
    wanted = dedup(np.array(ids), 2)
    found = whole(rows, servers, wanted, keep)
    return [float(row[0]) for row in found[wanted.inverse]]


def learn(rows: LocalRows, id_: int, gradient: float) -> None:
    grads = np.full((1, 3), gradient, np.float32)
    part = TableGradients(np.array([id_]), np.array([0, 1, 1]), grads)
    rows.learn(part, {"lr": 1.0, "momentum": 0.0}, 0)


def by_id(part: TableGradients) -> dict[int, float]:
    return {int(i): float(g[0]) for i, g in zip(part.ids, part.gradients, strict=True)}


def test_rows_are_fetched_once() -> None:
    rows, servers = make()
    assert read(rows, servers, 1, 2, 1) == [1, 2, 1]
    assert read(rows, servers, 2, 3) == [2, 3]
    assert servers.asked == [[1, 2], [3]]


def test_a_read_without_keep_caches_nothing() -> None:
    rows, servers = make()
    read(rows, servers, 1)
    learn(rows, 1, -10.0)
    assert read(rows, servers, 1, 5, keep=False) == [11, 5]
    assert len(rows) == 1
    assert by_id(rows.differences()) == {1: 5}


def test_differences_are_divided_by_the_workers_and_sent_once() -> None:
    rows, servers = make()
    read(rows, servers, 1, 2)
    learn(rows, 1, -8.0)
    part = rows.differences()
    assert by_id(part) == {1: 4, 2: 0}
    assert part.starts[-1] == 2
    # half of the progress stays visible on top of the servers' reply
    rows.take(np.array([1]), np.full((1, 3), 5.0, np.float32))
    assert read(rows, servers, 1) == [9]
    assert by_id(rows.rest()) == {1: 2, 2: 0}
    assert by_id(rows.differences()) == {}


def test_a_row_unused_for_some_windows_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geo_module, "KEPT_WINDOWS", 1)
    rows, servers = make()
    read(rows, servers, 1)
    learn(rows, 1, -8.0)
    rows.differences()
    servers.values[1] = 100.0
    assert read(rows, servers, 1) == [9]  # in the next window: the cached value
    for _ in range(2):
        rows.differences()
    # old is 1 + 4 + 2: the servers' 100 and the unsent part, 9 - 7
    assert read(rows, servers, 1) == [102]
    assert servers.asked == [[1], [1]]


@pytest.mark.parametrize(("workers", "windows"), [(1, 4), (2, 40)])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_what_a_narrow_form_drops_is_sent_later(wire: str, workers: int, windows: int) -> None:
    plan = msgspec.structs.replace(table_plan(), wire=wire)
    rows, servers = LocalRows(plan, servers=1, workers=lambda: workers, limit=100), Servers()
    servers.values[7] = 0.0
    read(rows, servers, 7)
    gradient = np.array([[1.0, 0.01234567, -0.7654321]], np.float32)
    rows.learn(TableGradients(np.array([7]), np.array([0, 1]), gradient), {"lr": 1.0}, 0)
    sent = [rows.differences().gradients[0].astype(np.float64)]
    assert (np.abs(sent[0] + gradient[0] / workers) > 1e-5).any()
    for _ in range(windows):
        read(rows, servers, 7)
        sent.append(rows.differences().gradients[0])
    np.testing.assert_allclose(np.sum(sent, axis=0), -gradient[0], atol=1e-6)


def test_a_recently_used_row_is_read_from_the_cache() -> None:
    rows, servers = make()
    read(rows, servers, 1)
    servers.values[1] = 100.0
    for _ in range(geo_module.KEPT_WINDOWS):
        rows.differences()
    assert read(rows, servers, 1) == [1]
    rows.differences()
    assert read(rows, servers, 1) == [1]
    for _ in range(geo_module.KEPT_WINDOWS + 1):
        rows.differences()
    assert read(rows, servers, 1) == [100]


def test_gradients_find_their_rows_by_any_array_of_ids() -> None:
    rows, servers = make()
    wanted = dedup(np.array([3, 4, 5]), 2)
    whole(rows, servers, wanted)
    grads = np.ones((3, 3), np.float32)
    for ids in (wanted.ids, wanted.ids.copy()):
        rows.learn(TableGradients(ids, wanted.starts, grads), {"lr": 1.0, "momentum": 0.0}, 0)
    assert read(rows, servers, 3, 4, 5, keep=False) == [1, 2, 3]


def test_gradients_of_an_evicted_row_are_dropped() -> None:
    rows, servers = make(limit=1)
    wanted = dedup(np.array([3]), 2)
    whole(rows, servers, wanted)
    rows.differences()
    read(rows, servers, 4)
    rows.differences()
    # row 5 takes the free slot of row 3
    read(rows, servers, 5)
    part = TableGradients(wanted.ids, wanted.starts, np.ones((1, 3), np.float32))
    rows.learn(part, {"lr": 1.0, "momentum": 0.0}, 0)
    assert read(rows, servers, 4, 5, keep=False) == [4, 5]


def test_the_least_recently_used_rows_are_evicted_beyond_the_limit() -> None:
    rows, servers = make(limit=2)
    for window in range(3):
        read(rows, servers, 10 + window)
        learn(rows, 10 + window, -4.0)
        sent = by_id(rows.differences())
    # 12 is of this window; 10 is evicted, and its remaining difference is sent
    assert sent == {10: 1, 12: 2}
    assert len(rows) == 2
    rows.take(np.array([10, 12]), np.full((2, 3), 5.0, np.float32))
    assert len(rows) == 2
    rows.clear()
    assert len(rows) == 0


def test_window_numbers_restart_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geo_module, "MAX_WINDOWS", 3)
    rows, servers = make()
    for _ in range(10):
        assert read(rows, servers, 1, 2) == [1, 2]
        learn(rows, 1, 0.0)
        assert by_id(rows.differences()) == {1: 0, 2: 0}
        assert rows.window <= 4
    assert servers.asked == [[1, 2]]


def test_an_expired_row_is_fetched_again_and_keeps_its_rule_state() -> None:
    plan = table_plan("adagrad")
    kept, fresh = (LocalRows(plan, servers=2, workers=lambda: 2, limit=100) for _ in range(2))
    servers = Servers()
    options = {"lr": 1.0, "lr_decay": 0.0, "eps": 0.0}

    def step(rows: LocalRows, gradient: float) -> None:
        part = TableGradients(
            np.array([7]), np.array([0, 1, 1]), np.full((1, 3), gradient, np.float32)
        )
        rows.learn(part, options, 0)

    read(kept, servers, 7)
    step(kept, 3.0)
    kept.expire()
    # nothing is sent twice
    assert by_id(kept.rest()) == {}
    servers.values[7] = 10.0
    assert read(kept, servers, 7) == read(fresh, servers, 7) == [10.0]
    step(kept, 4.0)
    step(fresh, 4.0)
    assert read(fresh, servers, 7) == [9.0]
    assert read(kept, servers, 7) == pytest.approx([10.0 - 4.0 / 5.0])


def test_an_expired_row_stays_expired_when_window_numbers_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(geo_module, "MAX_WINDOWS", 2)
    rows, servers = make()
    read(rows, servers, 1)
    rows.expire()
    for _ in range(4):
        read(rows, servers, 2)
        rows.differences()
    servers.values[1] = 5.0
    assert read(rows, servers, 1) == [5.0]
