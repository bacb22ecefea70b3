# SPDX-License-Identifier: Apache-2.0
"""A job with parameter servers in one process: a thread for each worker, direct calls of servers.

Everything but the sockets is real, so tests compare the values of a job in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tests.workers import descend
from torch import Tensor, nn

from fleetlight.fleet.plan.bound_plan import build_plan
from fleetlight.fleet.served.job import ServedJob
from fleetlight.fleet.served.session import ServerSession
from fleetlight.kernels import Initializer, dedup, first_values, table_seed
from fleetlight.ps import messages as m
from fleetlight.ps.layers.embedding import SparseEmbedding
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.interface import MemoryChannel
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator import Communicator
from fleetlight.ps.worker.connections import CONTROL, PUSH
from fleetlight.ps.worker.reply_values import Wanted
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy

Built = tuple[nn.Module, list[torch.optim.Optimizer]]
Build = Callable[[], Built]

#: the settings of each mode
SYNC: dict[str, Any] = {"a_sync": False}
ASYNC: dict[str, Any] = {"a_sync": True}


def geo(k: int, **more: Any) -> dict[str, Any]:
    """The strategy of GeoSGD."""
    return {"a_sync": True, "a_sync_configs": {"k_steps": k, **more}}


@dataclasses.dataclass
class Member:
    """One worker, with the objects that its script would have."""

    index: int
    context: ServedJob
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    @property
    def session(self) -> ServerSession:
        return self.context.session

    @property
    def communicator(self) -> Communicator:
        return self.session.communicator

    def barrier(self) -> None:
        self.context.barrier()

    def descend(self, loss: Any) -> None:
        descend(self.optimizer, loss)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        parameters = [
            p
            for o in self.context.optimizers
            for g in o.optimizer.param_groups
            for p in g["params"]
        ]
        return float(self.context.clip(parameters, max_norm, norm_type))

    def rows(self, ids: Any, table: int = 0) -> Any:
        """The rows of ids on the servers."""
        distinct = dedup(np.asarray(ids, np.int64), self.session.client.server_num)
        [rows] = self.session.client.pull([Wanted(table, distinct, insert=False)]).rows
        return rows[distinct.inverse]


class Job:
    """Servers, and workers that train in threads."""

    def __init__(
        self, build: Build, strategy: dict[str, Any], *, workers: int, servers: int, **facts: Any
    ) -> None:
        """`is_local=False`: workers treat the servers as those of another host.

        `is_embedded=True`: as one in their process.
        """
        self.build = build
        self.is_local = facts.get("is_local", True)
        self.is_embedded = facts.get("is_embedded", False)
        self.strategy = strategy
        self.workers = workers
        self.deadline_s = facts.get("deadline_s", 20.0)
        self._lock = threading.Lock()
        self.servers = [
            Server(i, servers, workers, version="test", deadline_s=self.deadline_s)
            for i in range(servers)
        ]
        for server in self.servers:
            model, optimizers = self.built()
            bound = build_plan(
                model,
                optimizers,
                DistributedStrategy(**strategy),
                worker_num=workers,
                server_num=servers,
            )
            server.open(bound.plan, bound.optimizers, bound.dense)

    def built(self) -> Built:
        with self._lock:
            torch.manual_seed(0)
            return self.build()

    def client(self, index: int) -> Client:
        servers = len(self.servers)

        def connect(lane: str) -> Sequence[MemoryChannel]:
            channels = [MemoryChannel(s, f"server {s.index}") for s in self.servers]
            for channel in channels:
                channel.is_local, channel.is_embedded = self.is_local, self.is_embedded
            known = lane if lane in (CONTROL, PUSH) else "pull"
            for server, channel in enumerate(channels):
                channel.call(m.Greeting("test", index, self.workers, server, servers, 1, known))
            return channels

        return Client(index, self.workers, servers, connect)

    def job_of(self, **parts: Any) -> ServedJob:
        return ServedJob(**parts)

    def member(self, index: int) -> Member:
        """A worker whose session is not yet open."""
        model, optimizers = self.built()
        client = self.client(index)
        context = self.job_of(
            role=Role(index=index, worker_num=self.workers, server_num=len(self.servers)),
            group=ServedGroup(client, self.deadline_s),
            strategy=DistributedStrategy(**self.strategy),
            session=ServerSession(client, None),
        )
        context.models.append(context.manage_model(model))
        context.optimizers.extend(map(context.manage_optimizer, optimizers))
        return Member(index, context, model, optimizers)

    def work(self, index: int, train: Callable[[Member], Any]) -> Any:
        member = self.member(index)
        try:
            member.session.open(member.context)
            value = train(member)
            member.session.stop()
        except BaseException as error:
            member.context.group.fail(str(error))
            raise
        member.context.group.leave()
        return value

    def run(self, train: Callable[[Member], Any]) -> list[Any]:
        """The results of `train` in all workers; raises the first error after all have ended."""
        results = self.tried(train)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def tried(self, train: Callable[[Member], Any]) -> list[Any]:
        """The result or the error of `train` in each worker."""
        results: list[Any] = [None] * self.workers

        def work(index: int) -> None:
            try:
                results[index] = self.work(index, train)
            except BaseException as error:
                results[index] = error

        threads = [
            threading.Thread(target=work, args=(index,), daemon=True)
            for index in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive(), "a worker still waits"
        return results


def run(
    build: Build,
    train: Callable[[Member], Any],
    strategy: dict[str, Any] | None = None,
    *,
    workers: int = 2,
    servers: int = 1,
    **facts: Any,
) -> list[Any]:
    """Train in a new job; returns the results of `train` in all workers."""
    job = Job(
        build, SYNC if strategy is None else strategy, workers=workers, servers=servers, **facts
    )
    return job.run(train)


class Net(nn.Module):
    """Rows of a few ids into a linear layer; `rows` makes it a torch layer with so many rows."""

    def __init__(self, dim: int = 4, ids: int = 3, rows: int = 0, **layer: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(dim * ids, 1)
        self.emb: nn.Module = (
            nn.Embedding(rows, dim, sparse=True) if rows else SparseEmbedding(dim, **layer)
        )

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.linear(self.emb(ids).flatten(1))
        return out


def started(rows: int, dim: int, table: str = "emb", first: int = 0, seed: int = 0) -> Tensor:
    """Fleetlight's first values of the ids from `first` on."""
    ids = np.arange(first, first + rows)
    values = first_values(ids, dim, table_seed(seed, table), Initializer("uniform", -0.05, 0.05))
    return torch.from_numpy(values)


def loss_of(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    """A mean over the batch."""
    loss: Tensor = ((model(ids) - target) ** 2).mean()
    return loss


def batches(steps: int, workers: int, size: int = 8, ids: int = 30, each: int = 3) -> Any:
    """Zipf ids [steps, workers, size, each] below `ids`, and targets."""
    random = np.random.default_rng(0)
    bound = random.zipf(1.3, (steps, workers, size, each)) % ids
    targets = random.standard_normal((steps, workers, size, 1), np.float32)
    return torch.from_numpy(bound), torch.from_numpy(targets)
