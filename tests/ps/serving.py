# SPDX-License-Identifier: Apache-2.0
"""A server in this process, and workers whose requests a test writes by hand."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from fleetlight.errors import FleetError
from fleetlight.ps import messages as m
from fleetlight.ps.plan import DensePlan, InitializerPlan, OptimizerPlan, Plan, RulePlan, TablePlan
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.interface import Connection

DIM = 2
#: a table and a dense parameter, both stepped by SGD with a learning rate of 1
OPTIONS = [{"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False}]


def plan(mode: str = "sync", workers: int = 2, **facts: Any) -> Plan:
    """Two tables that start with zeros, and a dense parameter of three ones."""
    tables = [
        TablePlan(name, DIM, RulePlan("sgd", {}), InitializerPlan("zeros"), 0, 0)
        for name in ("users", "items")
    ]
    usual: dict[str, Any] = {
        "server_num": 1,
        "seed": 0,
        "tables": tables,
        "dense": [DensePlan("bias", (3,), "float32", 0, 0)],
        "optimizers": [OptimizerPlan("torch.optim.sgd.SGD", 1, True)],
    }
    return Plan(mode=mode, worker_num=workers, **{**usual, **facts})


def opened(the_plan: Plan, deadline_s: float = 20.0, index: int = 0) -> Server:
    """A server that is open with this plan."""
    server = closed_server(the_plan.worker_num, deadline_s, index, the_plan.server_num)
    open_up(server, the_plan)
    return server


def open_up(
    server: Server, the_plan: Plan, durable: Durable | None = None, loaded: Any = None
) -> None:
    """Open a server with the plan of a job."""
    parameters = [torch.ones(dense.shape) for dense in the_plan.dense]
    weights = [torch.nn.Parameter(parameter) for parameter in parameters]
    optimizers = [torch.optim.SGD(weights, lr=1.0) for _ in the_plan.optimizers]
    server.open(the_plan, optimizers, weights, loaded, durable)


def closed_server(
    workers: int = 2, deadline_s: float = 20.0, index: int = 0, servers: int = 1
) -> Server:
    """A server that has no plan yet."""
    return Server(index, servers, workers, version="test", deadline_s=deadline_s)


def hello(index: int, lane: str, workers: int = 2, server: int = 0, servers: int = 1) -> m.Greeting:
    """The greeting of a worker."""
    return m.Greeting("test", index, workers, server, servers, started_at=1, lane=lane)


def ask(number: int = 0, reached: tuple[int, int] = (0, 0), **facts: Any) -> m.LeaseRequest:
    """A worker's request for its next range of 96 records."""
    usual: dict[str, Any] = {
        "loader": 0,
        "turn": 1,
        "epoch": 0,
        "back": 1,
        "whole": [(0, 96)],
        "unit": 4,
        "batches": 4,
    }
    return m.LeaseRequest(number=number, reached=reached, **{**usual, **facts})


@dataclasses.dataclass
class Worker:
    """A worker that calls a server over three connections."""

    server: Server
    index: int
    workers: int = 2
    servers: int = 1
    epoch: int = 0

    def __post_init__(self) -> None:
        self.sequence = -1
        self.greeted: list[Connection] = []
        self.lanes = {lane: Connection(lane) for lane in ("control", "push", "pull")}
        for lane in self.lanes:
            self.greet(lane)

    def greet(self, lane: str) -> m.Welcome:
        facts = (self.workers, self.server.index, self.servers)
        reply: m.Welcome = self.say(hello(self.index, lane, *facts), lane=lane)[0]
        return reply

    def greet_again(self, lane: str, incarnation: int) -> None:
        """Greet as this incarnation of the worker."""
        self.lanes[lane] = Connection(lane)
        greeting = hello(self.index, lane, self.workers)
        self.say(msgspec.structs.replace(greeting, incarnation=incarnation, away_s=5.0), lane=lane)

    def say(self, message: m.Message, *arrays: Any, lane: str = "control") -> tuple[Any, list[Any]]:
        if isinstance(message, m.Greeting):
            self.greeted.append(self.lanes[lane])
        reply, reply_arrays = self.server(self.lanes[lane], message, list(arrays))
        return reply, list(reply_arrays)

    def leave(self) -> None:
        """Leave, and acknowledge the reply."""
        self.say(m.Leave())
        self.say(m.GoodbyeAck())

    def push(
        self,
        step: int,
        tables: dict[int, tuple[Sequence[int], Any]] | None = None,
        dense: Sequence[float] | None = None,
        **facts: Any,
    ) -> tuple[m.Pushed, list[Any]]:
        """Push the gradients of a step: {table: (ids, one value for each whole row)}."""
        return self.send(self.push_request(step, tables or {}, dense, **facts), tables or {}, dense)

    def push_request(
        self, step: int, tables: dict[int, Any], dense: Sequence[float] | None, **facts: Any
    ) -> m.Push:
        self.sequence += 1
        usual: dict[str, Any] = {
            "sequence": self.sequence,
            "epoch": self.epoch,
            "optimizer": 0,
            "step": step,
            "phase": 0,
            "options": OPTIONS,
            "tables": [m.TablePush(number) for number in tables],
            "dense": dense is not None,
        }
        return m.Push(**{**usual, **facts})

    def send(
        self, message: m.Push, tables: dict[int, Any], dense: Sequence[float] | None
    ) -> tuple[m.Pushed, list[Any]]:
        arrays: list[Any] = []
        for ids, numbers in tables.values():
            arrays += [ids_of(ids), rows_of(numbers)]
        if dense is not None:
            arrays.append(self._stepped(np.array(dense, np.float32)))
        return self.say(message, *arrays, lane="push")

    def _stepped(self, gradients: Any) -> Any:
        """The dense part of a push: gradients, or the worker's own step if workers step."""
        service = self.server._service
        if service is None or not service.plan.workers_step_dense:
            return gradients
        return -gradients  # SGD with a rate of 1

    def apply(self, step: int, factor: float, **facts: Any) -> tuple[m.Pushed, list[Any]]:
        self.sequence += 1
        message = m.Apply(self.sequence, self.epoch, 0, step, 0, factor, OPTIONS, **facts)
        return self.say(message, lane="push")

    def pull(self, table: int, ids: Sequence[int], **facts: Any) -> list[float]:
        """The first value of each row."""
        message = m.Pull([m.TablePull(table, facts.pop("insert", True))], False, **facts)
        return [float(row[0]) for row in self.say(message, ids_of(ids), lane="pull")[1][0]]

    def dense(self) -> list[float]:
        """The dense parameter."""
        return [float(x) for x in self.say(m.Pull([], True), lane="pull")[1][0]]

    def enter_barrier(
        self, barrier: int, operation: str, data: int = 0, deadline_s: float = 20.0
    ) -> Any:
        message = m.Barrier(barrier, operation, deadline_s)
        return self.say(message, np.array([data], np.uint8))[1]

    def disconnect(self, *lanes: str) -> None:
        """Close these lanes, or, without lanes, every connection the worker ever had."""
        for connection in [self.lanes[lane] for lane in lanes] or self.greeted:
            self.server.gone(connection, None)


def ids_of(ids: Sequence[int]) -> Any:
    return np.array(ids, np.int64)


def rows_of(numbers: Sequence[float]) -> Any:
    return np.repeat(np.array(numbers, np.float32)[:, None], DIM, axis=1)


def team(server: Server, workers: int = 2) -> list[Worker]:
    """All workers of a job."""
    return [Worker(server, index, workers) for index in range(workers)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of concurrent calls, or their errors; an error of the test itself is raised."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        errors = [future.exception(60) for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, (FleetError, ValueError)):
            raise error
    return [error or future.result() for error, future in zip(errors, futures, strict=True)]


def of_all(workers: Sequence[Worker], call: Callable[[Worker], Any]) -> list[Any]:
    """The replies, or errors, when all workers make the same call at the same time."""
    return together(*[lambda w=w: call(w) for w in workers])  # type: ignore[misc]
