# SPDX-License-Identifier: Apache-2.0
"""Jobs whose layers keep rows on their device train as jobs without, and pull fewer rows."""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.layers.devices import as_on_a_gpu
from tests.served import SYNC, Job, Member, Net, batches, loss_of, run
from tests.workers import descend, run_job
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight import static
from fleetlight.ps.layers.collection.embedding_collection import (
    EmbeddingCollection,
    EmbeddingFeature,
)
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from fleetlight.ps.worker.cached_rows import CachedRows
from fleetlight.ps.worker.reply_values import ReplyValues

STEPS, EVALUATED = 6, 3
IDS, TARGETS = batches(STEPS, 2, ids=30)
CACHE: Mapping[str, Any] = {"cache": "device", "cache_rows": 20}
SSP: dict[str, Any] = {"a_sync": True, "a_sync_configs": {"staleness": 3}}
Counted = tuple[int, int]


class Bag(nn.Module):
    """A bag of a table, whose rows a second layer reads without training them."""

    def __init__(self, **layer: Any) -> None:
        super().__init__()
        self.emb = SparseEmbeddingBag(4, "sum", padding_idx=2, table="t", **layer)
        self.fixed = SparseEmbedding(4, table="t", **layer)
        self.linear = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.fixed(ids[:, 0]).detach()
        out: Tensor = self.linear(torch.cat([self.emb(ids), read], 1))
        return out


class Many(nn.Module):
    """A collection with a table that has a cache and one that has none."""

    def __init__(self, **layer: Any) -> None:
        super().__init__()
        first = EmbeddingFeature(4, "one", **layer)
        self.emb = EmbeddingCollection({"a": first, "b": (4, "two"), "c": first}, concatenated=True)
        self.linear = nn.Linear(12, 1)

    def forward(self, ids: Tensor) -> Tensor:
        given = {name: ids[:, n : n + 1] for n, name in enumerate("abc")}
        out: Tensor = self.linear(self.emb(given))
        return out


def builder(model: Callable[..., nn.Module], layer: Mapping[str, Any]) -> Any:
    def build() -> Any:
        made = model(**layer)
        return made, [torch.optim.Adagrad(made.parameters(), lr=0.1)]

    return build


def counts(worker: Member) -> Counted:
    """Rows that lookups found on the device, and rows that they pulled."""
    found = worker.communicator.metrics()
    return int(found["cached_rows_found"]), int(found["cached_rows_copied"])


def evaluated(worker: Member) -> list[float]:
    with torch.no_grad():
        return [
            float(loss_of(worker.model, IDS[t, worker.index], TARGETS[t, worker.index]))
            for t in range(EVALUATED)
        ]


def step(worker: Member, t: int, micro: int = 2, clip: bool = False) -> list[float]:
    """A step of several batches."""
    losses = []
    worker.optimizer.zero_grad()
    for n in range(micro):
        loss = loss_of(worker.model, IDS[(t + n) % STEPS, worker.index], TARGETS[t, worker.index])
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    if clip:
        worker.clip(0.05)
    worker.optimizer.step()
    return losses


def values(worker: Member) -> list[Any]:
    dense = [p.detach().clone().numpy() for p in worker.model.parameters() if p.numel()]
    tables = range(len(worker.session.bound.plan.tables))
    return [*dense, *(worker.rows(range(30), table) for table in tables)]


def train(worker: Member) -> Any:
    """Losses in training and evaluation, and all values."""
    losses: list[float] = []
    for t in range(STEPS):
        losses += step(worker, t, clip=t == 2)
        losses += evaluated(worker)
        if t == 3:
            worker.barrier()
    worker.barrier()
    return losses, values(worker), worker.communicator.cached and counts(worker)


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("model", [Many, Net, Bag])
def test_sync_training_with_a_cache_equals_that_without(
    model: Callable[..., nn.Module], on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        as_on_a_gpu(monkeypatch)
    plain = run(builder(model, {}), train, SYNC, servers=2)
    cached = run(builder(model, CACHE), train, SYNC, servers=2)
    for (losses, found, _), (expected, others, none) in zip(cached, plain, strict=True):
        assert losses == expected
        for one, other in zip(found, others, strict=True):
            np.testing.assert_array_equal(one, other)
        assert none is None
    for _, _, (here, pulled) in cached:
        assert here > pulled / 2


def test_a_worker_pulls_again_what_another_one_changed() -> None:
    """Both have the rows of ids 0 to 9; worker 1 changes row 5, and worker 0 row 6."""
    every = torch.arange(10)

    def work(worker: Member) -> Any:
        emb: Any = worker.model
        pulls = []
        for turn in range(4):
            with torch.no_grad():
                before, found = counts(worker)[1], emb(every)
            pulls.append(counts(worker)[1] - before)
            np.testing.assert_array_equal(found.numpy(), worker.rows(every))
            if turn < 3:
                worker.optimizer.zero_grad()
                mine = {0: [6], 1: [5]}[worker.index] if turn < 2 else []
                (emb(torch.tensor(mine, dtype=torch.int64)).sum() * 8).backward()
                worker.optimizer.step()
        return pulls

    found = run(builder(lambda **layer: SparseEmbedding(4, **layer), CACHE), work, SYNC, servers=2)
    assert found == [[10, 2, 2, 0]] * 2


def test_a_table_that_does_not_train_is_pulled_once() -> None:
    def build() -> Any:
        model = Net(cache="device")
        model.emb.requires_grad_(False)
        return model, [torch.optim.SGD(model.linear.parameters(), lr=0.1)]

    def work(worker: Member) -> Any:
        for t in range(STEPS):
            step(worker, t, micro=1)
        return counts(worker)[1]

    distinct = [len(set(IDS[:, index].flatten().tolist())) for index in range(2)]
    assert run(build, work, SYNC) == distinct


def test_a_failed_step_and_a_barrier_drop_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Member) -> Any:
        ids = torch.arange(5)
        pulls = []

        def look_up() -> None:
            before = counts(worker)[1]
            with torch.no_grad():
                worker.model(ids)
            pulls.append(counts(worker)[1] - before)

        def failing(*given: Any, **more: Any) -> Any:
            raise RuntimeError("lost")

        look_up()
        look_up()
        worker.barrier()
        look_up()
        with monkeypatch.context() as patch:
            patch.setattr(worker.session.client, "push", failing)
            worker.model(ids).sum().backward()
            with pytest.raises(RuntimeError, match="lost"):
                worker.optimizer.step()
        look_up()
        worker.communicator.settle()
        look_up()
        look_up()
        worker.communicator.resume()
        look_up()
        look_up()
        return pulls

    build = builder(lambda **layer: SparseEmbedding(4, **layer), CACHE)
    assert run(build, work, SYNC, workers=1) == [[5, 0, 5, 5, 5, 5, 5, 0]]


def test_a_restarted_server_drops_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(worker: Member) -> Any:
        pulls = []
        for incarnation in (1, 1, 2, 2):
            monkeypatch.setattr(worker.session.client, "incarnations", lambda n=incarnation: [n])
            before = counts(worker)[1]
            with torch.no_grad():
                worker.model(torch.arange(5))
            pulls.append(counts(worker)[1] - before)
        return pulls

    build = builder(lambda **layer: SparseEmbedding(4, **layer), CACHE)
    assert run(build, work, SYNC, workers=1) == [[5, 0, 5, 0]]


def test_a_server_that_cannot_name_the_changed_rows_drops_the_table() -> None:
    def work(worker: Member) -> Any:
        cached = worker.communicator.cached
        assert isinstance(cached, CachedRows)
        update = worker.session.collect(worker.optimizer, 0)
        pulls = []
        none = np.empty(0, np.int64)
        for outdated in ({0: [none, none]}, {0: [none]}, {}):
            before = counts(worker)[1]
            with torch.no_grad():
                worker.model(torch.arange(5))
            pulls.append(counts(worker)[1] - before)
            cached.stepped(update, ReplyValues(outdated=outdated))
        return pulls

    build = builder(lambda **layer: SparseEmbedding(4, **layer), CACHE)
    assert run(build, work, SYNC, workers=1, servers=2) == [[5, 0, 5]]


def test_a_push_asks_for_changes_only_if_the_worker_has_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that only its own step changes need no report."""
    every, mine = torch.arange(10), torch.arange(4)

    def work(worker: Member) -> Any:
        client, asked = worker.session.client, []
        push = client.push

        def noted(request: Any, **more: Any) -> Any:
            asked.append(request.reports)
            return push(request, **more)

        monkeypatch.setattr(client, "push", noted)
        for turn in range(4):
            if turn == 2:
                with torch.no_grad():
                    worker.model(every)
            worker.descend(worker.model(mine).sum())
        return asked

    build = builder(lambda **layer: SparseEmbedding(4, **layer), CACHE)
    assert run(build, work, SYNC, workers=1) == [[[], [], [0], [0]]]


@pytest.mark.parametrize("is_local", [False, True])
def test_a_table_with_a_cache_is_not_read_ahead(is_local: bool) -> None:
    def work(worker: Member) -> Any:
        for t in range(3):
            worker.communicator.announce([{0: IDS[t, 0].numpy().reshape(-1)}])
            step(worker, t, micro=1)
        return worker.communicator.metrics().get("rows_read_ahead")

    [plain] = run(builder(Net, {}), work, SYNC, workers=1, is_local=is_local)
    assert plain is not None
    assert run(builder(Net, CACHE), work, SYNC, workers=1, is_local=is_local) == [None]


def test_bounded_staleness_uses_rows_as_old_as_it_allows() -> None:
    """Alone, a worker at step t reads rows that include at least t - 3 of its own steps."""
    ids = torch.arange(4)

    def work(worker: Member) -> Any:
        pulls, least = [], []
        for t in range(9):
            worker.communicator.flush()
            before = counts(worker)[1]
            found: Any = worker.model(ids)
            pulls.append(counts(worker)[1] - before)
            # each step adds 1 to the numbers of each row
            least.append(t - float(found.detach().min()))
            worker.descend(-found.sum())
        worker.communicator.flush()
        return pulls, least

    def build() -> Any:
        model = SparseEmbedding(2, initializer="zeros", **CACHE)
        return model, [torch.optim.SGD(model.parameters(), lr=1.0)]

    [(pulls, ages)] = run(build, work, SSP, workers=1)
    assert max(ages) == 3
    assert pulls == [4, 0, 0, 0, 4, 0, 0, 0, 4]


def test_the_staleness_of_cached_rows_is_counted() -> None:
    job = Job(
        builder(lambda **layer: SparseEmbedding(4, **layer), CACHE), SSP, workers=1, servers=1
    )

    def work(worker: Member) -> None:
        for _ in range(4):
            worker.communicator.flush()
            worker.descend(worker.model(torch.arange(4)).sum())
        worker.communicator.flush()

    job.run(work)
    assert job.servers[0].metrics().staleness == {0: 1, 1: 1, 2: 1, 3: 1}


def test_cached_rows_of_sync_mode_are_not_stale() -> None:
    job = Job(builder(Net, CACHE), SYNC, workers=1, servers=1)

    def work(worker: Member) -> None:
        for t in range(3):
            evaluated(worker)
            step(worker, t, micro=1)

    job.run(work)
    assert job.servers[0].metrics().staleness == {0: 3}


def test_threads_that_evaluate_never_leave_old_rows_behind() -> None:
    def work(worker: Member) -> Any:
        if worker.index:
            return [step(worker, t) for t in range(STEPS)] and None
        over = threading.Event()

        def evaluate() -> None:
            while not over.is_set():
                evaluated(worker)

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for t in range(STEPS):
                step(worker, t)
        finally:
            over.set()
            thread.join()
        with torch.no_grad():
            found = worker.model.get_submodule("emb")(torch.arange(30))
        np.testing.assert_array_equal(found.numpy(), worker.rows(range(30)))
        return None

    run(builder(Net, {**CACHE, "cache_rows": 25}), work, SYNC, servers=2)


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [True, False])
def test_programs_use_the_cache(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        as_on_a_gpu(monkeypatch)

    def work(worker: Member) -> Any:
        feed = {"ids": IDS[0, 0], "target": TARGETS[0, 0]}
        program = static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, feed)
        tested = program.clone(for_test=True)
        exe, losses = static.Executor(), []
        for t in range(4):
            feed = {"ids": IDS[t, 0], "target": TARGETS[t, 0]}
            for one in (program, tested, tested):
                losses += [float(loss) for loss in exe.run(one, feed, ["loss"])]
        return losses, values(worker), worker.communicator.cached and counts(worker)

    # padding reads a row of zeros after the others
    for model in (functools.partial(Net, padding_idx=2), Bag):
        [(expected, others, _)] = run(builder(model, {}), work, SYNC, workers=1)
        [(losses, found, (here, _))] = run(builder(model, CACHE), work, SYNC, workers=1)
        assert losses == expected
        assert here
        for one, other in zip(found, others, strict=True):
            np.testing.assert_array_equal(one, other)


def registered(cached: bool) -> Any:
    torch.manual_seed(0)
    model = fleet.distributed_model(Net(**CACHE) if cached else Net())
    return model, fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))


def serve(cached: bool) -> None:
    registered(cached)
    fleet.init_server()
    fleet.run_server()


def work(cached: bool) -> list[float]:
    """The losses of training and of an evaluation after each step."""
    model, optimizer = registered(cached)
    fleet.init_worker()
    index, losses = fleet.worker_index(), []
    for t in range(STEPS):
        descend(optimizer, loss_of(model, IDS[t, index], TARGETS[t, index]))
        with torch.no_grad():
            losses += [float(loss_of(model, IDS[n, index], TARGETS[n, index])) for n in (t, 0)]
    fleet.stop_worker()
    return losses


@pytest.mark.multiprocess
@pytest.mark.slow
def test_processes_receive_the_changed_ids() -> None:
    found = []
    for cached in (False, True):
        serving, working = functools.partial(serve, cached), functools.partial(work, cached)
        _, *workers = run_job(serving, working, servers=1, workers=2, deadline_s=40.0)
        assert [kind for kind, _ in workers] == ["value"] * 2, workers
        found.append([losses for _, losses in workers])
    assert found[0] == found[1]
