# SPDX-License-Identifier: Apache-2.0
"""Collective jobs on a GPU: NCCL with one worker, and two workers that share the GPU.

NCCL gives each worker a GPU of its own, so two workers reduce with Gloo here.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.needed import GPU, close, on_one_gpu
from tests.static.nets import batch, net
from tests.workers import run_processes
from torch import nn
from torch.nn.functional import mse_loss

import fleetlight as fleet
from fleetlight import static
from fleetlight.collective.forming import given_device
from fleetlight.fleet.job import current
from fleetlight.roles import Role

pytestmark = [*GPU, pytest.mark.multiprocess]
STEPS = 4


def trained(device: str, settings: dict[str, Any]) -> Any:
    """The parameters after a few steps; each worker has its part of the batches."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    strategy = fleet.DistributedStrategy(**settings)
    model = fleet.distributed_model(plain.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    for step in range(STEPS):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        x = x.chunk(fleet.worker_num())[fleet.worker_index()].to(device)
        optimizer.zero_grad()
        mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
    return [parameter.detach().cpu().numpy() for parameter in model.parameters()]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "process groups": {"shared_memory": False},
    "fp16": {"shared_memory": False, "compression": "fp16"},
    "int8": {"compression": "int8"},
    "topk": {"compression": "topk"},
    "batch norm": {"sync_batch_norm": True},
    "gradient merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
}
for _name in ("int8", "topk"):
    SETTINGS[_name] |= {"shared_memory": False, "compression_configs": {"min_size": 1}}


@pytest.mark.parametrize("case", SETTINGS)
def test_two_workers_reduce_the_gradients_of_a_gpu(case: str) -> None:
    results = [on_one_gpu(trained, device, SETTINGS[case]) for device in ("cpu", "cuda")]
    here, there = ([torch.from_numpy(a) for worker in one for a in worker] for one in results)
    # a codec rounds what differs in the last bit to another value
    bound = 0.05 if case in ("fp16", "int8", "topk") else 1e-4
    torch.testing.assert_close(there, here, rtol=bound, atol=bound)


def one_with_nccl(settings: dict[str, Any]) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    values = torch.arange(8.0, device="cuda")
    dist.all_reduce(values)
    assert values.tolist() == list(range(8))
    fleet.init(is_collective=True)
    found = fleet.all_reduce(values.clone())
    assert found.device.type == "cuda"
    assert current().group.device.type == "cuda"
    values_there = trained("cuda", settings)
    fleet.stop_worker()
    dist.destroy_process_group()
    return found.cpu().numpy(), values_there


@pytest.mark.parametrize("case", ["plain", "fp16"])
def test_one_worker_with_nccl(case: str) -> None:
    [(summed, there)] = run_processes(one_with_nccl, [(SETTINGS[case],)], deadline_s=40.0)
    assert summed.tolist() == list(range(8))
    [here] = on_one_gpu(trained, "cpu", {}, workers=1)
    close([torch.from_numpy(a) for a in there], [torch.from_numpy(a) for a in here])


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_a_program_equals_the_eager_step(compiler: str) -> None:
    models = []
    for device in ("cpu", "cuda"):
        model = net().eval().to(device)  # without dropout
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if device == "cpu":
            for number in range(STEPS):
                one = batch(number)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(one["x"]), one["y"]).backward()
                optimizer.step()
        else:
            executor = static.Executor("cuda", compile=compiler)
            program = captured_on(model, optimizer, device)
            for number in range(STEPS):
                executor.run(program, moved(batch(number), device), ["loss"])
        models.append(model)
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        close(mine, theirs)


def moved(values: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in values.items()}


def captured_on(model: nn.Module, optimizer: Any, device: str) -> static.Program:
    return static.capture(model, nn.functional.cross_entropy, optimizer, moved(batch(0), device))


def test_a_worker_takes_the_gpu_of_its_role() -> None:
    last = torch.cuda.device_count() - 1
    assert given_device(Role(device=last)) == torch.device("cuda", last)
    assert torch.cuda.current_device() == last
    torch.cuda.set_device(0)
