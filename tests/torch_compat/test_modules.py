# SPDX-License-Identifier: Apache-2.0
"""Wrappers of torch around a module are detected, during a forward and outside."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fleetlight.torch_compat.modules import wrappers_in, wrappers_of

pytestmark = pytest.mark.contract


@pytest.fixture
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class LooksUpWrappers(nn.Module):
    """Looks up its wrappers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = list(wrappers_of(self))
        return self.linear(x)


@pytest.mark.usefixtures("_process_group")
def test_a_forward_detects_its_wrapper() -> None:
    model = LooksUpWrappers()
    model(torch.ones(1, 2))
    assert model.seen == []
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(1, 2))
    assert model.seen == ["DistributedDataParallel"]
    assert list(wrappers_of(model)) == []
    assert list(wrappers_in(model)) == []
    assert list(wrappers_in(nn.Sequential(wrapped))) == ["DistributedDataParallel"]


def test_wrappers_of_submodules_are_detected() -> None:
    assert list(wrappers_in(nn.Sequential(nn.DataParallel(nn.Linear(2, 1))))) == ["DataParallel"]


@pytest.mark.usefixtures("_process_group")
def test_sharded_parameters_are_detected() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    sharded: Any = nn.Linear(2, 1)
    fully_shard(sharded, mesh=mesh)
    assert "a sharding into DTensors" in set(wrappers_in(sharded))
    with warnings.catch_warnings():
        # FSDP warns that one process has nothing to shard
        warnings.simplefilter("ignore")
        whole = FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))
    assert "FSDP" in set(wrappers_in(whole))
