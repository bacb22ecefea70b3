# SPDX-License-Identifier: Apache-2.0
"""Jobs with parameter servers in real processes, through the public API."""

import functools
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.workers import descend, run_job, run_processes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.errors import PeerError
from fleetlight.fleet.job import current, current_or_none
from fleetlight.ps.plan import ASYNC, GEO, SYNC
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.config_dicts import ASyncConfigsDict

pytestmark = pytest.mark.multiprocess

IDS = 60


def records() -> TensorDataset:
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.zipf(1.3, (96, 3)) % IDS)
    return TensorDataset(ids, torch.from_numpy(random.standard_normal((96, 1), np.float32)))


class Model(nn.Module):
    """Rows of three ids into a linear layer."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(dim)
        self.linear = nn.Linear(3 * dim, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.emb(ids).flatten(1))
        return out


def registered(strategy: DistributedStrategy | None = None, dim: int = 4) -> Any:
    torch.manual_seed(fleet.worker_index() if fleet.is_worker() else 9)
    if fleet.worker_num() == 1 or fleet.is_first_worker():
        torch.manual_seed(0)
    model = fleet.distributed_model(Model(dim))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, fleet.distributed_optimizer(optimizer, strategy)


def serve() -> str:
    registered()
    fleet.init_server()
    fleet.run_server()
    return "served"


def trained(global_batch: int = 8) -> Any:
    model, optimizer = registered()
    fleet.init_worker()
    loader = DataLoader(records(), batch_size=global_batch // fleet.worker_num())
    for _ in range(2):
        for ids, target in fleet.shard(loader):
            descend(optimizer, ((model(ids) - target) ** 2).mean())
    fleet.barrier_worker()
    session = current().session
    assert session is not None
    prefetched = session.communicator.metrics().get("rows_read_ahead", 0.0)
    with torch.no_grad():
        rows = model.emb(torch.arange(IDS))
    dense = [p.detach().numpy().tolist() for p in model.linear.parameters()]
    fleet.stop_worker()
    fleet.stop_worker()
    assert current_or_none() is None
    return rows.numpy().tolist(), dense, prefetched


def alone() -> Any:
    """Run as `python train.py`: the environment names no job."""
    for name in [name for name in os.environ if name.startswith("FLEET_")]:
        del os.environ[name]
    fleet.init()
    return trained()


def scheduled(role: str, then: str = "") -> Any:
    """Run as a process of MindSpore's cluster, without server addresses and ranks."""
    host, port = os.environ["FLEET_MASTER"].split(":")
    deadline = os.environ["FLEET_DEADLINE_S"]
    for name in [name for name in os.environ if name.startswith("FLEET_")]:
        del os.environ[name]
    os.environ.update(
        MS_ROLE=role,
        MS_SCHED_HOST=host,
        MS_SCHED_PORT=port,
        MS_WORKER_NUM="2",
        MS_SERVER_NUM="2",
        MS_TOPO_TIMEOUT=deadline,
    )
    try:
        if then.endswith("late"):
            return average_and_leave(then)
        fleet.init()
        if then == "fail":
            registered()
            fleet.init_worker()  # so that the other worker has joined
            session = current().session
            assert session is not None
            session.fail("ValueError: on purpose")
            current().group.fail("ValueError: on purpose")
            return "failed"
        return serve() if fleet.is_server() else trained()
    except SystemExit as end:
        return "exit", end.code
    except PeerError as error:
        return str(error)


def average_and_leave(then: str) -> str:
    """Workers average among themselves; one of them fails at the end."""
    fleet.init(strategy=DistributedStrategy(a_sync=True, a_sync_configs={"dense": "allreduce"}))
    if fleet.is_server():
        return serve()
    registered()
    fleet.init_worker()
    session = current().session
    assert session is not None
    fleet.barrier_worker()
    if then == "fail late":
        session.stop = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    try:
        fleet.stop_worker()
    except ZeroDivisionError:
        return "failed"
    return "left"


@pytest.fixture(scope="module")
def single() -> Any:
    [answer] = run_processes(alone, [()])
    return answer


@pytest.mark.contract
def test_servers_and_workers_equal_one_process(single: Any) -> None:
    answers = run_job(serve, trained)
    assert answers[:2] == [("value", "served")] * 2
    assert [kind for kind, _ in answers[2:]] == ["value"] * 2
    compare([answer for _, answer in answers[2:]], single)


def train_in(mode: str, wire: str = "fp32") -> tuple[float, float]:
    """A process of a job: the loss before and after."""
    torch.manual_seed(0)
    k_steps = 4 if mode == GEO else 0
    configs: ASyncConfigsDict = {"k_steps": k_steps, "table_wire": wire}
    strategy = DistributedStrategy(a_sync=mode != SYNC, a_sync_configs=configs)
    model = fleet.distributed_model(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return 0.0, 0.0
    fleet.init_worker()
    session = current().session
    assert session is not None
    plan = session.bound.plan
    assert (plan.mode, plan.tables[0].wire) == (mode, wire)
    ids, target = records().tensors

    def loss() -> float:
        fleet.barrier_worker()
        with torch.no_grad():
            return float((model(ids) - target).square().mean())

    before = loss()
    for part in range(0, 96, 8):
        mine = slice(part + 4 * fleet.worker_index(), part + 4 * fleet.worker_index() + 4)
        descend(optimizer, (model(ids[mine]) - target[mine]).square().mean())
    found = before, loss()
    fleet.stop_worker()
    return found


@pytest.mark.contract
@pytest.mark.parametrize("mode", [ASYNC, GEO])
def test_asynchronous_workers_train(mode: str) -> None:
    work = functools.partial(train_in, mode)
    answers = run_job(work, work)
    assert [kind for kind, _ in answers] == ["value"] * 4, answers
    for before, after in (losses for _, losses in answers[2:]):
        assert after < before


@pytest.mark.parametrize("mode", [SYNC, ASYNC, GEO])
def test_rows_travel_as_bfloat16(mode: str) -> None:
    work = functools.partial(train_in, mode, "bf16")
    answers = run_job(work, work)
    assert [kind for kind, _ in answers] == ["value"] * 4, answers
    for before, after in (losses for _, losses in answers[2:]):
        assert after < before


def test_scheduler_assigns_ranks_and_server_addresses(single: Any) -> None:
    roles = ["MS_SCHED", "MS_PSERVER", "MS_PSERVER", "MS_WORKER", "MS_WORKER"]
    answers = run_processes(scheduled, [(role,) for role in roles])
    assert answers[:3] == [("exit", 0), "served", "served"]
    compare(answers[3:], single)


def test_scheduler_reports_a_missing_server() -> None:
    roles = ["MS_SCHED", "MS_PSERVER", "MS_WORKER", "MS_WORKER"]
    scheduler, *others = run_processes(scheduled, [(role,) for role in roles], deadline_s=6.0)
    assert scheduler == ("exit", 1)
    for text in others:
        assert re.search(r"the scheduler \(.*\): 1 of 2 servers joined", text)


def test_failed_worker_ends_scheduler_and_servers() -> None:
    each = [("MS_SCHED",), ("MS_PSERVER",), ("MS_PSERVER",), ("MS_WORKER", "fail"), ("MS_WORKER",)]
    scheduler, *others = run_processes(scheduled, each)
    assert scheduler == ("exit", 1)
    assert others[2] == "failed"
    for text in (*others[:2], others[3]):
        assert "failed: ValueError: on purpose" in text


def test_workers_that_average_report_their_end_to_the_scheduler() -> None:
    kinds = ["MS_SCHED", "MS_PSERVER", "MS_PSERVER", "MS_WORKER", "MS_WORKER"]
    for ends, code in ((("late", "late"), 0), (("fail late", "fail late"), 1)):
        each = zip(kinds, ("late", "late", "late", *ends), strict=True)
        scheduler, *others = run_processes(scheduled, list(each))
        assert scheduler == ("exit", code)
        assert others[2:] == ["failed" if code else "left"] * 2


def compare(answers: Sequence[Any], single: Any) -> None:
    """Compare each worker's rows and dense values with those of one process."""
    for rows, dense, prefetched in answers:
        assert prefetched > 0
        np.testing.assert_allclose(rows, single[0], rtol=1e-5, atol=1e-7)
        for mine, theirs in zip(dense, single[1], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def serve_until_killed() -> str:
    """Server 1 dies once training has begun."""
    registered()
    fleet.init_server()
    if fleet.server_index() == 1:
        service = current().process
        assert service is not None
        server: Any = service.server
        with server._changed:
            # steps notify conditions of their own
            while server._service is None or server._service.pushes.progress.versions.version <= 3:
                server._changed.wait(0.01)
        os._exit(9)
    try:
        fleet.run_server()
    except Exception as error:
        return str(error)
    return "no worker missed server 1"


def train_until_error() -> str:
    model, optimizer = registered()
    fleet.init_worker()
    try:
        for _ in range(100_000):
            descend(optimizer, model(torch.arange(30).view(10, 3)).sum())
    except Exception as error:
        current().group.fail(str(error))
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_workers_name_a_dead_server() -> None:
    answers = run_job(serve_until_killed, train_until_error, deadline_s=8)
    assert answers[1][0] == "error"  # it died without a result
    for kind, text in answers[2:]:
        assert kind == "value"
        assert text.startswith(("PeerLostError", "DeadlineError"))
        assert "server 1" in text


def die_before_a_step() -> str:
    model, optimizer = registered()
    fleet.init_worker()
    if fleet.worker_index() == 1:
        os._exit(9)
    try:
        model(torch.arange(3).view(1, 3)).sum().backward()
        optimizer.step()
        fleet.barrier_worker()
    except Exception as error:
        current().group.fail(str(error))
        return f"{type(error).__name__}: {error}"
    return "no error"


def serve_until_error() -> str:
    try:
        serve()
    except Exception as error:
        return str(error)
    return "no error"


def test_servers_and_workers_name_a_dead_worker() -> None:
    zero, _, worker, _ = run_job(serve_until_error, die_before_a_step)
    assert worker[0] == "value"
    assert worker[1].startswith("PeerLostError")
    assert "worker 1" in worker[1]
    assert "worker 1" in zero[1]


def other_script() -> str:
    registered(dim=5)
    try:
        fleet.init_worker()
    except Exception as error:
        current().group.fail(str(error))
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_different_scripts_are_refused() -> None:
    answers = run_job(serve_until_error, other_script, servers=1, workers=1)
    assert answers[1][1].startswith("PlanError")
    assert "plan.tables[emb].dim: 4 here, 5 there" in answers[1][1]


class _Kept(logging.Handler):
    """Keeps the log lines of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained_in_memory(shared_memory: bool) -> Any:
    """Train with rows of 2 KiB; returns the values and what the log says of memory."""
    kept = _Kept()
    logging.getLogger("fleetlight").addHandler(kept)
    logging.getLogger("fleetlight").setLevel(logging.DEBUG)
    model, optimizer = registered(DistributedStrategy(shared_memory=shared_memory), dim=512)
    fleet.init_worker()
    for ids, target in fleet.shard(DataLoader(records(), batch_size=16)):
        descend(optimizer, ((model(ids) - target) ** 2).mean())
    with torch.no_grad():
        rows = model.emb(torch.arange(IDS))
    fleet.stop_worker()
    return rows.numpy().tolist(), [line for line in kept.lines if "memory" in line]


def serve_wide_rows() -> str:
    registered(dim=512)
    fleet.init_server()
    fleet.run_server()
    return "served"


def test_rows_and_gradients_are_the_same_through_shared_memory() -> None:
    said = {True: ["rows and gradients of server 0 go through shared memory"], False: []}
    values = []
    for shares, lines in said.items():
        work = functools.partial(trained_in_memory, shares)
        _, worker = run_job(serve_wide_rows, work, servers=1, workers=1)
        assert worker[0] == "value", worker[1]
        rows, found = worker[1]
        assert found == lines
        values.append(rows)
    assert values[0] == values[1]
