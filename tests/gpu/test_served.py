# SPDX-License-Identifier: Apache-2.0
"""Jobs with servers whose models are on a GPU equal those in main memory."""

import functools
from typing import Any

import pytest
import torch
from tests.gpu.needed import GPU, close, on_both
from tests.ps.layers.pooled import Pooled
from tests.served import ASYNC, SYNC, Member, Net, batches, geo, loss_of, run
from tests.workers import run_job
from torch import nn

import fleetlight as fleet
from fleetlight import static

pytestmark = GPU
STEPS = 6
IDS, TARGETS = batches(STEPS, 2, ids=30)


def build(device: str, kind: Any = torch.optim.Adagrad) -> Any:
    model = Net().to(device)
    return model, [kind(model.parameters(), lr=0.1)]


def values(worker: Member) -> Any:
    """All rows and dense parameters."""
    worker.barrier()
    model: Any = worker.model
    dense = [parameter.detach().cpu() for parameter in model.linear.parameters()]
    return torch.from_numpy(worker.rows(range(30))), dense


def train(worker: Member, device: str, max_norm: float = 0.0) -> Any:
    for t in range(STEPS):
        worker.optimizer.zero_grad()
        loss_of(worker.model, IDS[t, worker.index], TARGETS[t, worker.index].to(device)).backward()
        if max_norm:
            worker.clip(max_norm)
        worker.optimizer.step()
    return values(worker)


def job(device: str, strategy: Any = SYNC, kind: Any = torch.optim.Adagrad, **facts: Any) -> Any:
    """Train in a job whose workers are threads."""
    work = functools.partial(train, device=device, max_norm=facts.pop("max_norm", 0.0))
    return run(functools.partial(build, device, kind), work, strategy, **facts)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sync_training(kind: Any, workers: int, servers: int) -> None:
    facts = {"kind": kind, "workers": workers, "servers": servers}
    here, there = on_both(functools.partial(job, **facts))
    close(there, here)


def test_clipping() -> None:
    here, there = on_both(functools.partial(job, max_norm=0.05))
    close(there, here)


@pytest.mark.parametrize("mode", [ASYNC, geo(2)], ids=["async", "geo"])
def test_other_modes(mode: dict[str, Any]) -> None:
    here, there = on_both(functools.partial(job, strategy=mode, kind=torch.optim.SGD, workers=1))
    # how old the rows of a step are depends on time
    torch.testing.assert_close(there, here, rtol=0.1, atol=0.1)


def test_large_parameters_are_written_in_pieces() -> None:
    """Each server stores a part of a parameter."""

    def made(device: str) -> Any:
        model = nn.Linear(300, 400).to(device)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def work(worker: Member, device: str) -> Any:
        for step in range(3):
            torch.manual_seed(step)
            worker.optimizer.zero_grad()
            worker.model(torch.randn(8, 300).to(device)).square().mean().backward()
            worker.optimizer.step()
        worker.barrier()
        return [parameter.detach().cpu() for parameter in worker.model.parameters()]

    def trained(device: str) -> Any:
        step = functools.partial(work, device=device)
        return run(functools.partial(made, device), step, SYNC, workers=1, servers=3)

    here, there = on_both(trained)
    close(there, here)


def test_autocast_with_a_scaler() -> None:
    def work(worker: Member) -> Any:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        worker.context.scalers.append(scaler)
        for t in range(STEPS):
            worker.optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                out = worker.model(IDS[t, worker.index])
            assert out.dtype == torch.float16
            loss = (out.float() - TARGETS[t, worker.index].cuda()).square().mean()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(worker.optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**8
        return values(worker)

    found = run(functools.partial(build, "cuda"), work, SYNC)
    torch.testing.assert_close(found, job("cpu"), rtol=0.05, atol=0.02)


def test_an_infinity_on_one_worker_drops_the_step_of_all() -> None:
    def work(worker: Member) -> Any:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        worker.context.scalers.append(scaler)
        before = values(worker)[1]
        loss = loss_of(worker.model, IDS[0, worker.index], TARGETS[0, worker.index].cuda())
        scaler.scale(loss * (torch.inf if worker.index else 1.0)).backward()  # type: ignore[no-untyped-call]
        scaler.step(worker.optimizer)
        scaler.update()
        close(values(worker)[1], before)
        return scaler.get_scale()

    assert run(functools.partial(build, "cuda"), work, SYNC) == [2.0**7] * 2


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_programs(compiler: str) -> None:
    def work(worker: Member, device: str) -> Any:
        feed = {"ids": IDS[0, 0], "target": TARGETS[0, 0].to(device)}
        program = static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, feed)
        exe = static.Executor(device, compile=compiler)
        for t in range(STEPS):
            exe.run(program, {"ids": IDS[t, 0], "target": TARGETS[t, 0].to(device)}, ["loss"])
        return values(worker)

    def trained(device: str) -> Any:
        step = functools.partial(work, device=device)
        return run(functools.partial(build, device), step, SYNC, workers=1)

    here, there = on_both(trained)
    close(there, here)


@pytest.mark.parametrize("combiner", ["sum", "mean", "max"])
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_bags_of_programs(compiler: str, combiner: Any) -> None:
    def work(worker: Member, device: str) -> Any:
        feed = {"ids": IDS[0, 0]}
        if combiner == "sum":
            feed["weights"] = torch.linspace(0.5, 2, IDS[0, 0].numel(), device=device).view(
                IDS[0, 0].shape
            )
        feed["target"] = TARGETS[0, 0].to(device)
        program = static.capture(worker.model, nn.functional.mse_loss, worker.optimizer, feed)
        exe = static.Executor(device, compile=compiler)
        for t in range(STEPS):
            feed.update(ids=IDS[t, 0], target=TARGETS[t, 0].to(device))
            exe.run(program, feed, ["loss"])
        return values(worker)

    def made(device: str) -> Any:
        model = Pooled(combiner).to(device)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def trained(device: str) -> Any:
        step = functools.partial(work, device=device)
        return run(functools.partial(made, device), step, SYNC, workers=1)

    here, there = on_both(trained)
    close(there, here)


class Model(nn.Module):
    """Rows of three ids into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = fleet.nn.SparseEmbedding(4)
        self.linear = nn.Linear(12, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.emb(ids).flatten(1))
        return out


def registered(device: str) -> Any:
    torch.manual_seed(0)
    model = fleet.distributed_model(Model().to(device))
    return model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def serve() -> bool:
    """Serve; returns True if the server has used a GPU."""
    registered("cpu")
    fleet.init_server()
    fleet.run_server()
    return torch.cuda.is_initialized()  # type: ignore[no-any-return, no-untyped-call]


def work_on(device: str) -> Any:
    model, optimizer = registered(device)
    fleet.init_worker()
    index = fleet.worker_index()
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, IDS[t, index], TARGETS[t, index].to(device)).backward()
        optimizer.step()
    fleet.barrier_worker()
    found = [parameter.detach().cpu().numpy() for parameter in model.linear.parameters()]
    fleet.stop_worker()
    return found


def work_on_cpu() -> Any:
    return work_on("cpu")


def work_on_gpu() -> Any:
    return work_on("cuda")


@pytest.mark.multiprocess
def test_two_processes_on_one_gpu_with_a_server_in_main_memory() -> None:
    results = []
    for work in (work_on_cpu, work_on_gpu):
        server, *workers = run_job(serve, work, servers=1, workers=2, deadline_s=40.0)
        assert server == ("value", False)
        assert [kind for kind, _ in workers] == ["value"] * 2, workers
        results.append([torch.from_numpy(array) for _, arrays in workers for array in arrays])
    here, there = results
    close(there, here)
