# SPDX-License-Identifier: Apache-2.0
"""The script of the traced jobs: what users write, with a window around each path."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tests.reading.paths import number
from tests.reading.recorder import window
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight import static

UNTRACED: AbstractContextManager[None] = nullcontext()
WARM = 4  # steps before a path: the first ones compile, connect and check
BEATS_S = 2.5  # each timer ends in it, such as that of heartbeats
RECORDS, BATCH = 512, 8


class Net(nn.Module):
    """One table and one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(4)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(ids).flatten(1)).squeeze(1)
        return out


def together(name: str) -> AbstractContextManager[None]:
    """The window of a path, once all workers are here."""
    if fleet.worker_num() > 1:
        fleet.barrier_worker()
    return window(number(name))


def ids_of(first: int, count: int) -> Tensor:
    """Two ids for each record: one that is new, one that has a row."""
    records = torch.arange(first, first + count)
    return torch.stack([records, records % 4], 1)


class Training:
    """A model with its optimizer and data, in the order of the quick start."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        self.model = fleet.distributed_model(model)
        self.optimizer = fleet.distributed_optimizer(optimizer)
        self.data = TensorDataset(inputs, torch.ones(len(inputs)))
        self.batches: Iterator[tuple[Tensor, ...]] = iter(())

    def open(self) -> None:
        """Begin to read; workers only."""
        loader = DataLoader(self.data, BATCH, shuffle=True)
        self.batches = iter(fleet.shard(loader))

    def next(self) -> tuple[Tensor, Tensor]:
        inputs, labels = next(self.batches)
        return inputs, labels

    def backward(self, inputs: Tensor, labels: Tensor) -> None:
        ((self.model(inputs) - labels) ** 2).mean().backward()

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.backward(inputs, labels)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def iteration(self) -> None:
        self.step(*self.next())

    def warm(self) -> None:
        for _ in range(WARM):
            self.iteration()

    def trace(self, kind: str) -> None:
        """A step, its optimizer.step alone, and one that reads its batch."""
        batch = self.next()
        with together(f"step_{kind}"):
            self.step(*batch)
        self.backward(*self.next())
        with together(f"optimizer_{kind}"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        with together(f"iteration_{kind}"):
            self.iteration()


def in_roles(
    train: Callable[[Training], None],
    path: AbstractContextManager[None] = UNTRACED,
) -> None:
    """A server serves, a worker trains; `path` begins when this process joins the job."""
    torch.manual_seed(0)
    training = Training(Net(), ids_of(0, RECORDS))
    if fleet.is_server():
        with path:
            fleet.init_server()
            fleet.run_server()
        return
    training.open()
    with path:
        fleet.init_worker()
        train(training)
    fleet.stop_worker()


def embedded() -> None:
    """The worker is its own server."""

    def train(training: Training) -> None:
        training.warm()
        training.trace("embedded")

    in_roles(train)


def sockets() -> None:
    """A worker and a server."""
    fleet.init()

    def train(training: Training) -> None:
        training.warm()
        training.trace("sockets")
        # no ids of the loader: the rows of its next batch are already here
        ids, labels = ids_of(RECORDS, BATCH), torch.ones(BATCH)
        with together("pull"):
            training.model(ids)
        training.step(ids, labels)
        fleet.save_persistables("checkpoint")
        training.iteration()
        with together("save_served"):
            fleet.save_persistables("checkpoint")

    in_roles(train)


def logged() -> None:
    """The same with a log."""
    fleet.init(strategy=fleet.DistributedStrategy(durability="log"))

    def train(training: Training) -> None:
        training.warm()
        batch = training.next()
        with together("step_log"):
            training.step(*batch)

    in_roles(train)


def killed() -> None:
    """The server is killed and resumes from its log, then the worker is killed and returns."""
    fleet.init(strategy=fleet.DistributedStrategy(durability="log"))
    role = os.environ["FLEET_ROLE"]
    with Path(f"{role}.lives").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(lives(role)) != 2:
        in_roles(die_and_kill)
    elif role == "server":  # it is killed at the end of this path
        in_roles(die_and_kill, window(number("server_restart"), everywhere=False))
    else:
        in_roles(Training.iteration, window(number("worker_return"), everywhere=False))


def die_and_kill(training: Training) -> None:
    """The worker of `killed`, until it kills itself."""
    training.warm()
    for _ in range(2):
        kill("server")
        training.iteration()
        time.sleep(BEATS_S)
    kill("worker")


def kill(role: str) -> None:
    """Kill the process that has this role now."""
    os.kill(lives(role)[-1], signal.SIGKILL)


def lives(role: str) -> list[int]:
    """The processes that have had a role."""
    return [int(line) for line in Path(f"{role}.lives").read_text().split()]


def plain() -> None:
    """A short training."""
    fleet.init()
    in_roles(Training.warm)


def collective() -> None:
    """Two workers, eager and then as a program."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    training = Training(nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)), torch.randn(RECORDS, 8))
    training.open()
    training.warm()
    training.trace("collective")
    fleet.save_persistables("checkpoint")
    training.iteration()
    with together("save_collective"):
        fleet.save_persistables("checkpoint")


def program() -> None:
    """Two workers that run a static program."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    x = static.data("x", [None, 8], torch.float32)
    y = static.data("y", [None], torch.float32)
    model = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    loss = ((model(x) - y) ** 2).mean()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.01))
    optimizer.minimize(loss)
    executor = static.Executor("cpu")
    executor.run(static.default_startup_program())
    feed = {"x": torch.randn(BATCH, 8), "y": torch.ones(BATCH)}
    for _ in range(WARM):
        executor.run(static.default_main_program(), feed=feed, fetch_list=[loss.name])
    with together("exe_run"):
        executor.run(static.default_main_program(), feed=feed, fetch_list=[loss.name])


def record_callbacks() -> None:
    """Record the callbacks of futures, which torch may call on threads of its own."""
    then, profile = torch._C.Future.then, sys.getprofile()

    def recorded(future: Any, callback: Callable[[Any], Any]) -> Any:
        def called(done: Any) -> Any:
            sys.setprofile(profile)
            return callback(done)

        return then(future, called)

    torch._C.Future.then = recorded  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    record_callbacks()
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
