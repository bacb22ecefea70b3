# SPDX-License-Identifier: Apache-2.0
"""Programs and eager loops load each other's checkpoints."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import descend, run_job, run_workers
from torch import Tensor, nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight import checkpoint, static
from fleetlight.errors import PlanError

pytestmark = pytest.mark.multiprocess

STEPS = 3


class WideDeep(nn.Module):
    """A model as in Fleet's examples; `net` writes a program, `forward` is for eager loops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.wide = fleet.nn.SparseEmbeddingBag(1, "sum", initializer="zeros")
        self.emb = fleet.nn.SparseEmbedding(4)
        self.moved = nn.Embedding(40, 2, sparse=True)
        self.tower = nn.Sequential(nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        deep = torch.cat([self.emb(ids).flatten(1), self.moved(ids).flatten(1)], 1)
        out: Tensor = self.wide(ids) + self.tower(deep)
        return out

    def net(self) -> tuple[Tensor, Tensor]:
        ids, y = static.data("ids", [None, 3], torch.int64), static.data("y", [None, 1])
        # not self(ids): the program sees the layers but no call of the model that owns them
        out = WideDeep.forward(self, ids)
        return out, F.mse_loss(out, y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(100 + step * 10 + fleet.worker_index())
    return torch.randint(0, 40, (8, 3), generator=draws), torch.rand(8, 1, generator=draws)


def serve() -> None:
    fleet.init_server()
    fleet.run_server()


def job(kind: str, first: int, load: str | None, save: str | None) -> Any:
    """Some steps of one kind, from one checkpoint into another; returns the predictions."""
    model = WideDeep()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    run = {"static": by_program, "late": by_late_model, "eager": by_loop}[kind](model, optimizer)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    if load is not None:
        assert fleet.load_persistables(load) == {"step": first}
    run(first)
    if save is not None:
        fleet.save_persistables(save, extra={"step": first + STEPS})
    fleet.barrier_worker()
    predictions = run(None)
    fleet.stop_worker()
    return predictions


def by_program(model: WideDeep, optimizer: torch.optim.Optimizer) -> Any:
    out, loss = model.net()
    main = static.default_main_program()
    test = main.clone(for_test=True)
    optimizer = fleet.distributed_optimizer(optimizer)
    optimizer.minimize(loss)
    executor = static.Executor()

    def run(first: int | None) -> Any:
        if first is None:
            ids, _ = batch(99)
            return executor.run(test, feed={"ids": ids}, fetch_list=[out])[0].tolist()
        executor.run(static.default_startup_program())
        for step in range(first, first + STEPS):
            executor.run(main, feed=dict(zip(("ids", "y"), batch(step), strict=True)))
        return None

    return run


def by_late_model(model: WideDeep, optimizer: torch.optim.Optimizer) -> Any:
    """Another module holds the layers too, so only the script can name them."""
    model.__dict__["twin"] = nn.ModuleList(model.children())
    run = by_program(model, optimizer)
    assert fleet.distributed_model(model) is model
    with pytest.raises(PlanError, match="called twice with the same model"):
        fleet.distributed_model(model)
    return run


def by_loop(model: WideDeep, optimizer: torch.optim.Optimizer) -> Any:
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)

    def run(first: int | None) -> Any:
        if first is None:
            with torch.no_grad():
                return model(batch(99)[0]).tolist()
        for step in range(first, first + STEPS):
            ids, y = batch(step)
            descend(optimizer, F.mse_loss(model(ids), y))
        return None

    return run


def run(size: tuple[int, int], *args: Any) -> Any:
    answers = run_job(
        functools.partial(job, *args),
        functools.partial(job, *args),
        servers=size[0],
        workers=size[1],
    )
    assert {kind for kind, _ in answers} == {"value"}, answers
    return [value for _, value in answers[size[0] :]]


@pytest.mark.long
@pytest.mark.parametrize("size", [(0, 1), (2, 2)])
def test_programs_and_eager_loops_share_checkpoints(size: tuple[int, int], tmp_path: Path) -> None:
    ends = {}
    for kind in ("static", "eager"):
        run(size, kind, 0, None, str(tmp_path / kind))
        for other in ("static", "eager"):
            ends[kind, other] = run(size, other, STEPS, str(tmp_path / kind), None)
    expected = torch.tensor(ends["eager", "eager"])
    for found in ends.values():
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_model_may_be_registered_after_its_program(tmp_path: Path) -> None:
    run((1, 1), "late", 0, None, str(tmp_path / "late"))
    ends = [run((1, 1), kind, STEPS, str(tmp_path / "late"), None) for kind in ("late", "eager")]
    torch.testing.assert_close(*map(torch.tensor, ends), rtol=1e-5, atol=1e-6)


def collective(folder: str) -> list[str]:
    """Without tables: the program is saved under the names of a model registered later."""
    first, second = nn.Linear(3, 4), nn.Linear(4, 1)
    loss = second(first(static.data("x", [None, 3]))).mean()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    optimizer = fleet.distributed_optimizer(optimizer)
    optimizer.minimize(loss)
    model = fleet.distributed_model(nn.Sequential(first, second))
    executor = static.Executor()
    executor.run(static.default_startup_program())
    x = torch.full((2, 3), float(fleet.worker_index()))
    executor.run(static.default_main_program(), feed={"x": x})
    fleet.save_persistables(folder)
    fleet.load_persistables(folder)
    with pytest.raises(PlanError, match="also a parameter of another registered model"):
        fleet.distributed_model(nn.Sequential(model, nn.Linear(1, 1)))
    return [name for name, _ in model.named_parameters()]


@pytest.mark.long
def test_collective_programs_and_eager_loops_share_checkpoints(tmp_path: Path) -> None:
    [names, _] = run_workers(collective, 2, str(tmp_path / "c"))
    saved = checkpoint.read(tmp_path / "c").model().tensors
    assert set(saved) == set(names) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.long
def test_one_process_loads_a_checkpoint_of_several(tmp_path: Path) -> None:
    run((2, 2), "static", 0, None, str(tmp_path / "many"))
    [static_end] = run((0, 1), "static", STEPS, str(tmp_path / "many"), None)
    [eager_end] = run((0, 1), "eager", STEPS, str(tmp_path / "many"), None)
    torch.testing.assert_close(
        torch.tensor(static_end), torch.tensor(eager_end), rtol=1e-5, atol=1e-6
    )
