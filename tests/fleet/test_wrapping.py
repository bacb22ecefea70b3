# SPDX-License-Identifier: Apache-2.0
"""A model that another library also distributes is refused."""

import os
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fleetlight as fleet
from fleetlight.errors import PlanError

pytestmark = pytest.mark.multiprocess
ONE = torch.ones(2, 2)


def registered() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fleet.distributed_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    return model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))


def wrapped() -> None:
    model, _ = registered()
    with pytest.raises(PlanError, match=r"DistributedDataParallel distributes it too: .* twice"):
        DistributedDataParallel(model)(ONE)
    # without that line all is well
    model(ONE).sum().backward()


def wrapped_later() -> None:
    """Wrapped after the agreement, as in a loop that a library takes over."""
    model, optimizer = registered()
    model(ONE).sum().backward()
    optimizer.step()
    with pytest.raises(PlanError, match=r"accelerator\.prepare"):
        DistributedDataParallel(model)(ONE)


def within() -> None:
    model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
    model = fleet.distributed_model(model)
    with pytest.raises(PlanError, match="DistributedDataParallel distributes it too"):
        model(ONE)


def another_model() -> bool:
    """Another model may be in DDP and may take the output of ours."""
    model, optimizer = registered()
    other = DistributedDataParallel(nn.Linear(2, 1))
    other(model(ONE)).sum().backward()
    optimizer.step()
    return True


def sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    model, _ = registered()
    fully_shard(model)
    with pytest.raises(PlanError, match="FSDP distributes it too"):
        model(ONE)


@pytest.mark.parametrize("function", [wrapped, wrapped_later, within, another_model, sharded])
def test_second_distribution_of_a_model_is_named(function: Any) -> None:
    run_workers(function)


def prepared() -> None:
    from accelerate import Accelerator

    rank, size = str(fleet.worker_index()), str(fleet.worker_num())
    # as set by torchrun and accelerate launch
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    model, optimizer = registered()
    accelerator = Accelerator(cpu=True)
    twice, stepped = accelerator.prepare(model, optimizer)
    with pytest.raises(PlanError, match=r"the line that wraps the model .*accelerator\.prepare"):
        accelerator.backward(twice(ONE).sum())
    # its backward is torch's own
    accelerator.backward(model(ONE).sum())
    optimizer.step()
    assert stepped is not optimizer


def test_model_prepared_by_accelerate_is_refused() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    run_workers(prepared)
