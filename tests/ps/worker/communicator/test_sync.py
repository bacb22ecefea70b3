# SPDX-License-Identifier: Apache-2.0
"""Sync communicator: equal to plain torch in one process on the global batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.served import SYNC, Job, Member, Net, batches, loss_of, run, started
from torch import Tensor, nn

from fleetlight.errors import ConfigError, GradientError, PlanError
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.layers.table_gradient import TableGradient

ROWS, DIM, STEPS = 30, 4, 50
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.5)]


def adagrad(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def two_adams(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SparseAdam for sparse gradients, as torch requires, and a dense optimizer."""
    return [
        torch.optim.SparseAdam([model.emb.weight], lr=0.02),  # type: ignore[list-item,union-attr]
        torch.optim.AdamW(model.linear.parameters(), lr=0.02),  # type: ignore[union-attr]
    ]


def build_with(optimizers: Optimizers) -> Callable[[], Any]:
    def build() -> Any:
        model = Net(DIM)
        return model, optimizers(model)

    return build


def reference(rows: int = ROWS) -> Net:
    """A plain torch model with the initial values of the servers."""
    torch.manual_seed(0)
    model = Net(DIM, rows=rows)
    with torch.no_grad():
        model.emb.weight.copy_(started(rows, DIM))  # type: ignore[operator,union-attr]
    return model


def all_values(worker: Member) -> tuple[Tensor, list[Tensor]]:
    """All rows and all dense parameters."""
    worker.barrier()
    rows = torch.from_numpy(worker.rows(range(ROWS)))
    return rows, [p.detach().clone() for p in worker.model.linear.parameters()]  # type: ignore[union-attr]


def assert_near(got: Tensor, expected: Tensor) -> None:
    """To 1e-6 of the largest of the numbers."""
    scale = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6 * scale)


def compare(results: list[Any], model: Net) -> None:
    for rows, dense in results:
        assert_near(rows, model.emb.weight.detach())  # type: ignore[arg-type,union-attr]
        for mine, theirs in zip(dense, model.linear.parameters(), strict=True):
            assert_near(mine, theirs.detach())


def train_plain(model: Net, optimizers: list[Any], ids: Tensor, targets: Tensor) -> None:
    for t in range(len(ids)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, ids[t].flatten(0, 1), targets[t].flatten(0, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()


def train_on(ids: Tensor, targets: Tensor) -> Callable[[Member], Any]:
    def train(worker: Member) -> Any:
        for t in range(len(ids)):
            for optimizer in worker.optimizers:
                optimizer.zero_grad()
            loss_of(worker.model, ids[t, worker.index], targets[t, worker.index]).backward()
            for optimizer in worker.optimizers:
                optimizer.step()
        return all_values(worker)

    return train


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("optimizers", [sgd, adagrad, two_adams])
def test_training_equals_plain_torch(optimizers: Optimizers, servers: int) -> None:
    ids, targets = batches(STEPS, 2, ids=ROWS)
    ids[::5] = ids[::5, :1, :1, :1]  # some batches have a single id, on one server
    model = reference()
    train_plain(model, optimizers(model), ids, targets)
    compare(run(build_with(optimizers), train_on(ids, targets), servers=servers), model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_steps_continue_without_a_worker_that_ran_out_of_data() -> None:
    """The mean is then over the remaining workers."""
    ids, targets = batches(20, 2, ids=ROWS)

    def train(worker: Member) -> Any:
        for t in range(10 if worker.index == 1 else 20):
            worker.optimizer.zero_grad()
            loss_of(worker.model, ids[t, worker.index], targets[t, worker.index]).backward()
            worker.optimizer.step()
        return all_values(worker)

    model = reference()
    [optimizer] = adagrad(model)
    train_plain(model, [optimizer], ids[:10], targets[:10])
    train_plain(model, [optimizer], ids[10:, :1], targets[10:, :1])
    compare(run(build_with(adagrad), train, servers=2), model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_uses_the_norm_of_the_global_batch(max_norm: float) -> None:
    ids, targets = batches(20, 2, ids=ROWS)
    model, norms = reference(), []
    [optimizer] = adagrad(model)
    for t in range(20):
        optimizer.zero_grad()
        loss_of(model, ids[t].flatten(0, 1), targets[t].flatten(0, 1)).backward()
        gradient = model.emb.weight.grad.coalesce()  # type: ignore[operator,union-attr]
        dense = [p.grad for p in model.linear.parameters() if p.grad is not None]
        values = [gradient.values(), *dense]
        total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v) for v in values]))
        for value in values:
            value.mul_(min(1.0, max_norm / (float(total) + 1e-6)))
        model.emb.weight.grad = gradient  # type: ignore[assignment,union-attr]
        norms.append(float(total))
        optimizer.step()

    def train(worker: Member) -> Any:
        mine = []
        for t in range(20):
            worker.optimizer.zero_grad()
            loss_of(worker.model, ids[t, worker.index], targets[t, worker.index]).backward()
            mine.append(worker.clip(max_norm))
            worker.optimizer.step()
        assert mine == pytest.approx(norms, rel=1e-4)
        return all_values(worker)

    compare(run(build_with(adagrad), train, servers=2), model)


def test_only_the_euclidean_norm_is_supported() -> None:
    def train(worker: Member) -> None:
        loss_of(worker.model, torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 1)).backward()
        with pytest.raises(ConfigError, match="norm_type=1, expected 2"):
            worker.clip(1.0, norm_type=1.0)

    run(build_with(sgd), train, workers=1)


def test_workers_must_agree_on_clipping() -> None:
    ids, targets = batches(1, 2, ids=ROWS)

    def train(worker: Member) -> None:
        loss_of(worker.model, ids[0, worker.index], targets[0, worker.index]).backward()
        if worker.index == 0:
            worker.clip(1.0)
        worker.optimizer.step()

    for error in Job(build_with(sgd), SYNC, workers=2, servers=1).tried(train):
        assert isinstance(error, PlanError)
        assert "worker 0 clips the gradients, worker 1 does not" in str(error)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_gradients_accumulate_until_zero_grad() -> None:
    ids, targets = batches(10, 2, ids=ROWS)

    def train(worker: Member) -> Any:
        for t in range(0, 10, 2):
            loss_of(worker.model, ids[0, 0], targets[0, 0]).backward()
            worker.optimizer.zero_grad(set_to_none=t % 4 == 0)
            for i in (t, t + 1):
                loss_of(worker.model, ids[i, worker.index], targets[i, worker.index]).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        return all_values(worker)

    model = reference()
    [optimizer] = adagrad(model)
    for t in range(0, 10, 2):
        optimizer.zero_grad()
        for i in (t, t + 1):
            loss_of(model, ids[i].flatten(0, 1), targets[i].flatten(0, 1)).backward()
        optimizer.step()
    compare(run(build_with(adagrad), train), model)


def test_steps_use_the_scheduled_learning_rate() -> None:
    ids, targets = batches(12, 2, ids=ROWS)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

    def train(worker: Member) -> Any:
        scheduler = schedule(worker.optimizer)
        for t in range(12):
            worker.optimizer.zero_grad()
            loss_of(worker.model, ids[t, worker.index], targets[t, worker.index]).backward()
            worker.optimizer.step()
            scheduler.step()
        return all_values(worker)

    model = reference()
    [optimizer] = sgd(model)
    scheduler = schedule(optimizer)
    for t in range(12):
        train_plain(model, [optimizer], ids[t : t + 1], targets[t : t + 1])
        scheduler.step()
    compare(run(build_with(sgd), train), model)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_an_infinity_on_one_worker_skips_the_step_for_all() -> None:
    """As in one process, the scaler backs off and Adam's step count stays."""
    ids, targets = batches(12, 2, ids=ROWS)

    def train(worker: Member) -> Any:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100), []
        worker.context.scalers.append(scaler)
        for t in range(12):
            for optimizer in worker.optimizers:
                optimizer.zero_grad()
            loss = loss_of(worker.model, ids[t, worker.index], targets[t, worker.index])
            if t == 4 and worker.index == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            for optimizer in worker.optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return (*all_values(worker), scales)

    model = reference()
    optimizers = two_adams(model)
    for t in range(12):
        if t != 4:
            train_plain(model, optimizers, ids[t : t + 1], targets[t : t + 1])
    results = run(build_with(two_adams), train)
    compare([result[:2] for result in results], model)
    for result in results:
        assert result[2] == [2.0**10] * 4 + [2.0**9] * 8


def test_nan_is_refused_by_name_and_the_step_can_be_repeated() -> None:
    ids, targets = batches(2, 2, ids=ROWS)

    def train(worker: Member) -> Any:
        loss_of(worker.model, ids[0, worker.index], targets[0, worker.index]).backward()
        gradient: Any = worker.model.emb.weight.grad  # type: ignore[union-attr]
        assert isinstance(gradient, TableGradient)
        kept = gradient.parts[0].gradients.copy()
        if worker.index == 1:
            gradient.parts[0].gradients[0, 0] = np.nan
        with pytest.raises(GradientError, match=r"worker 1 computed .*emb.* NaN or infinite"):
            worker.optimizer.step()
        gradient = worker.model.emb.weight.grad  # type: ignore[union-attr]
        gradient.parts[0].gradients[:] = kept
        worker.optimizer.step()
        return all_values(worker)

    model = reference()
    train_plain(model, sgd(model), ids[:1], targets[:1])
    compare(run(build_with(sgd), train), model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_torch_embeddings_are_converted_with_the_values_of_worker_0(kind: Any) -> None:
    class TorchModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = kind(ROWS, DIM, sparse=True)
            self.linear = nn.Linear(DIM, 1)

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.emb(ids)
            out: Tensor = self.linear(rows if rows.dim() == 2 else rows.sum(1))
            return out

    def build() -> Any:
        model = TorchModel()
        return model, [torch.optim.SGD(model.parameters(), lr=0.01)]

    ids, targets = batches(10, 2, ids=ROWS)
    torch.manual_seed(0)
    model, optimizers = build()
    weight = model.emb.weight
    train_plain(model, optimizers, ids, targets)
    compare(run(build, train_on(ids, targets), servers=2), model)
    assert weight is model.emb.weight


def test_an_empty_batch_counts_as_a_step() -> None:
    ids, targets = batches(2, 2, ids=ROWS)

    def train(worker: Member) -> Any:
        for t in range(2):
            mine = ids[t, worker.index], targets[t, worker.index]
            if worker.index == 1:
                mine = mine[0][:0], mine[1][:0]
            worker.optimizer.zero_grad()
            ((worker.model(mine[0]) - mine[1]) ** 2).sum().backward()
            worker.optimizer.step()
        return all_values(worker)

    model = reference()
    [optimizer] = sgd(model)
    for t in range(2):
        optimizer.zero_grad()
        (((model(ids[t, 0]) - targets[t, 0]) ** 2).sum() / 2).backward()
        optimizer.step()
    compare(run(build_with(sgd), train, servers=3), model)


def test_training_works_with_more_servers_than_parameters() -> None:
    ids, targets = batches(3, 2, ids=ROWS)
    model = reference()
    train_plain(model, sgd(model), ids, targets)
    compare(run(build_with(sgd), train_on(ids, targets), servers=5), model)


def test_models_need_neither_tables_nor_dense_parameters() -> None:
    def dense() -> Any:
        model = nn.Linear(3, 1)
        return model, sgd(model)

    def sparse() -> Any:
        model = nn.Sequential(SparseEmbedding(1), nn.Flatten(0))
        return model, sgd(model)

    def train(worker: Member) -> Any:
        given = torch.ones(2, 3) if isinstance(worker.model, nn.Linear) else torch.tensor([1, 2, 1])
        for _ in range(3):
            worker.optimizer.zero_grad()
            worker.model(given).sum().backward()
            worker.optimizer.step()
        worker.barrier()
        return worker.model(given).detach()

    for build in (dense, sparse):
        first, second = run(build, train, servers=2)
        torch.testing.assert_close(first, second)
