# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of real jobs with parameter servers, and a job that dies during a save."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.workers import WorkerFailedError, reserved_port, run_processes
from torch import nn

import fleetlight as fleet
from fleetlight import checkpoint
from fleetlight.fleet.job import current
from fleetlight.ps.tables import table

pytestmark = pytest.mark.multiprocess

IDS = torch.arange(40).reshape(10, 2, 2) % 7 * 10**12


def join(kind: str, index: int, ports: list[int], workers: int) -> None:
    os.environ.update(
        FLEET_ROLE=kind,
        FLEET_INDEX=str(index),
        FLEET_WORKER_NUM=str(workers),
        FLEET_SERVER_NUM=str(len(ports)),
        FLEET_SERVER_ENDPOINTS=",".join(f"127.0.0.1:{port}" for port in ports),
    )
    fleet.init()


def build(dense: str = "servers") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(fleet.nn.SparseEmbedding(3), nn.Flatten(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    strategy = fleet.DistributedStrategy(a_sync=False, a_sync_configs={"dense": dense})
    return fleet.distributed_model(model), fleet.distributed_optimizer(optimizer, strategy)


def train(model: nn.Module, optimizer: Any, steps: range, first: int = 0) -> None:
    for step in steps:
        optimizer.zero_grad()
        # equal batches on all workers, so that their number does not matter
        (model(IDS[step, first:]) - 1.0).pow(2).mean().backward()
        optimizer.step()


def values(model: nn.Module) -> list[Any]:
    fleet.barrier_worker()
    model.eval()
    with torch.no_grad():
        rows = model.get_submodule("0")(torch.arange(-2, 9) * 10**12)
    model.train()
    return [rows.tolist(), *(p.tolist() for p in model.parameters() if p.numel())]


def save_at_four(dirname: str, *, kind: str) -> Any:
    model, optimizer = build()
    if kind == "server":
        return serve()
    fleet.init_worker()
    train(model, optimizer, range(4))
    fleet.save_persistables(dirname)
    # via worker0: the servers send their tables, and worker 0 writes them
    fleet.save_persistables(dirname + "-sent", via="worker0", background=True)
    train(model, optimizer, range(4, 8))
    return values(model)


def resume_job(dirname: str, *, kind: str, at_start: bool) -> Any:
    model, optimizer = build()
    if kind == "server":
        return serve(dirname if at_start else None)
    if at_start:
        fleet.init_worker()
    else:
        fleet.load_persistables(dirname)
    at_four = values(model)
    train(model, optimizer, range(4, 8))
    return at_four, values(model)


def serve(dirname: str | None = None) -> None:
    fleet.init_server(dirname)
    fleet.run_server()


def run_process(
    function: Any,
    kind: str,
    index: int,
    ports: list[int],
    workers: int,
    args: tuple[Any, ...],
    facts: dict[str, Any],
) -> Any:
    join(kind, index, ports, workers)
    value = function(*args, kind=kind, **facts)
    if kind == "worker":
        fleet.stop_worker()
    return value


def run_job(function: Any, servers: int, workers: int, *args: Any, **facts: Any) -> list[Any]:
    """The result of each worker."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(servers):
            holder, port = reserved_port()
            stack.enter_context(holder)
            ports.append(port)
        each = [(function, "server", n, ports, workers, args, facts) for n in range(servers)]
        each += [(function, "worker", n, ports, workers, args, facts) for n in range(workers)]
        return run_processes(run_process, each)[servers:]


def close(one: Any, other: Any) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.gate
@pytest.mark.long
@pytest.mark.contract
def test_other_numbers_of_servers_resume_from_a_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    zero, one = run_job(save_at_four, 2, 2, path)
    close(zero, one)
    for name in (path, path + "-sent"):
        checkpoint.read(name).verify()
    ((at_four, end),) = run_job(resume_job, 1, 1, path, at_start=False)
    close(end, zero)
    # a server that starts from a checkpoint has the values; workers count the steps
    for loaded, _ in run_job(resume_job, 2, 1, path + "-sent", at_start=True):
        close(loaded, at_four)


def save_with_dense(dirname: str, *, kind: str, dense: str) -> Any:
    """The workers have different batches here."""
    model, optimizer = build(dense)
    if kind == "server":
        return serve()
    fleet.init_worker()
    train(model, optimizer, range(4), fleet.worker_index())
    fleet.save_persistables(dirname, background=True)
    at_four = values(model)
    train(model, optimizer, range(4, 8), fleet.worker_index())
    return at_four, values(model)


def resume_with_dense(dirname: str, *, kind: str, dense: str) -> Any:
    model, optimizer = build(dense)
    if kind == "server":
        return serve()
    fleet.init_worker()
    # the load replaces earlier training and its bias correction
    train(model, optimizer, range(3), fleet.worker_index())
    fleet.load_persistables(dirname)
    at_four = values(model)
    train(model, optimizer, range(4, 8), fleet.worker_index())
    return at_four, values(model)


@pytest.mark.parametrize(
    ("before", "after", "servers"),
    [("allreduce", "allreduce", 3), ("allreduce", "servers", 1), ("servers", "allreduce", 2)],
)
def test_dense_values_move_between_servers_and_workers(
    tmp_path: Path, before: str, after: str, servers: int
) -> None:
    path = str(tmp_path / "ckpt")
    expected = run_job(save_with_dense, 2, 2, path, dense=before)
    [optimizer] = checkpoint.read(path).optimizers()
    assert sorted(optimizer.entry.state) == ["2.bias", "2.weight"]
    resumed = run_job(resume_with_dense, servers, 2, path, dense=after)
    for one, other in zip(resumed, expected, strict=True):
        close(one[0], other[0])
        close(one[1], other[1])


def save_twice(dirname: str) -> None:
    """One process that dies during its second save."""
    fleet.init()
    model, optimizer = build()
    train(model, optimizer, range(2))
    fleet.save_persistables(dirname)
    train(model, optimizer, range(2, 4))
    write = table.write_table

    def die(*args: Any) -> Any:
        write(*args)
        os._exit(9)

    table.write_table = die
    fleet.save_persistables(dirname)


def load_alone(dirname: str) -> Any:
    fleet.init()
    build()
    fleet.load_persistables(dirname)
    step = current().step
    fleet.save_persistables(dirname)
    fleet.stop_worker()
    return step


def test_job_killed_during_a_save_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    with pytest.raises(WorkerFailedError, match="died without a result"):
        run_processes(save_twice, [(path,)])
    assert checkpoint.read(path).manifest.step == 2
    assert len(list(Path(path).glob("generation-*"))) == 2
    assert run_processes(load_alone, [(path,)]) == [2]
    # the next save removes the remains
    assert len(list(Path(path).glob("generation-*"))) == 1
