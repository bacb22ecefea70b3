# SPDX-License-Identifier: Apache-2.0
"""Small jobs that save, or load and continue: one script for an earlier version and this one.

    python -m tests.earlier.jobs save|load NAME PLACE

prints the numbers after the save as JSON. They are equal, whichever version saved.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight import static


class Net(nn.Module):
    """A table, an embedding of torch that becomes a table, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = nn.Embedding(20, 3, sparse=True)
        self.rows = fleet.nn.SparseEmbedding(2)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(torch.cat([self.moved(ids), self.rows(ids)], 1)))
        return out


class WideDeep(nn.Module):
    """`net()` writes the program, as FleetX' models do; the model itself is never called."""

    cost: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.tower = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 1))
        self.wide = fleet.nn.SparseEmbeddingBag(1, "sum", initializer="zeros")
        self.deep = fleet.nn.SparseEmbedding(3)

    def net(self) -> None:
        ids = static.data("ids", [None, 4], "int64")
        score = (self.wide(ids) + self.tower(self.deep(ids).flatten(1))) * self.scale
        self.cost = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))


def eager_served(saves: bool, place: str) -> list[float]:
    fleet.init()
    model = fleet.distributed_model(Net())
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    fleet.init_worker()

    def step(number: int) -> float:
        loss = (model(torch.arange(8) + number) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    found = _steps_around_the_save(saves, place, step)
    fleet.stop_worker()
    return found


def static_net(saves: bool, place: str) -> list[float]:
    fleet.init()
    model = WideDeep()
    model.net()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    optimizer.minimize(model.cost)
    executor = static.Executor("cpu")
    executor.run(static.default_startup_program())
    fleet.init_worker()

    def step(number: int) -> float:
        # ids of the checkpoint; first values of other ids also depend on the table's name
        batch = {"ids": (torch.arange(8).reshape(2, 4) + number) % 10}
        [cost] = executor.run(feed=batch, fetch_list=[model.cost])
        return float(cost)

    found = _steps_around_the_save(saves, place, step)
    fleet.stop_worker()
    return found


def _steps_around_the_save(saves: bool, place: str, step: Callable[[int], float]) -> list[float]:
    if saves:
        for number in range(3):
            step(number)
        fleet.save_persistables(place, extra={"note": "three steps"})
    else:
        assert fleet.load_persistables(place) == {"note": "three steps"}
    return [step(number) for number in range(3, 6)]


def collective(saves: bool, place: str) -> list[float]:
    """Saved within an epoch: the rest of it and of the random numbers follows."""
    fleet.init(is_collective=True)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    records = torch.arange(80).float().reshape(20, 4).sin()
    loader = fleet.shard(DataLoader(records, batch_size=4, shuffle=True))  # type: ignore[arg-type]
    if not saves:
        fleet.load_persistables(place)
    found: list[float] = []
    for number, batch in enumerate(loader):
        loss = (model(batch) - 1).square().mean() * torch.rand(())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if saves and number < 2:
            if number == 1:
                fleet.save_persistables(place)
            continue
        found.append(float(loss.detach()))
    return found


def inference(saves: bool, place: str) -> list[float]:
    ids = torch.arange(6)
    if not saves:
        loaded: list[float] = fleet.load_inference_model(place)(ids).flatten().tolist()
        return loaded
    fleet.init()
    model = fleet.distributed_model(nn.Sequential(fleet.nn.SparseEmbedding(2), nn.Linear(2, 1)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fleet.init_worker()
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    fleet.save_inference_model(place, (torch.arange(5),))
    with torch.no_grad():
        found: list[float] = model(ids).flatten().tolist()
    fleet.stop_worker()
    return found


def program(saves: bool, place: str) -> list[float]:
    executor = static.Executor("cpu")
    batch = {"x": torch.arange(12.0).reshape(3, 4).sin(), "y": torch.ones(3, 1)}
    if saves:
        x, y = static.data("x", [None, 4]), static.data("y", [None, 1])
        loss = (nn.Linear(4, 1)(x) - y).square().mean()
        written = static.default_main_program()
        static.minimize(torch.optim.Adam(written.parameters(), lr=0.1), loss)
        executor.run(static.default_startup_program())
        for _ in range(2):
            executor.run(feed=batch, fetch_list=[loss])
        written.save(place)
    else:
        written = static.load_program(place)
    return [float(executor.run(written, feed=batch, fetch_list=["loss"])[0]) for _ in range(3)]


def strategy(saves: bool, place: str) -> list[float]:
    """Settings that are not set keep their default; set ones are restored."""
    settings = fleet.DistributedStrategy(
        a_sync=True,
        a_sync_configs={"k_steps": 100, "send_queue_size": 4},
        durability="log",
        amp_configs={"dtype": "bfloat16"},
        seed=3,
    )
    if saves:
        settings.to_file(place)
    read = fleet.DistributedStrategy.from_file(place)
    assert list(read.items()) == list(settings.items()), (read, settings)
    return [read.a_sync_configs.k_steps, read.seed, read.a_sync_configs.send_queue_size]


JOBS = (strategy, eager_served, collective, static_net, inference, program)


def main() -> None:
    """Runs one job."""
    act, name, place = sys.argv[1:]
    torch.manual_seed(0)
    [job] = [job for job in JOBS if job.__name__ == name]
    print(json.dumps(job(act == "save", place)))


if __name__ == "__main__":
    main()
