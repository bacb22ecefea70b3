# SPDX-License-Identifier: Apache-2.0
"""A user's script for mypy, never run: it flags the lines that end in a comment, and no others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fleetlight as fleet


class Clicks(NamedTuple):
    """A batch."""

    ids: Tensor
    labels: Tensor


class Images(Dataset[tuple[Tensor, int]]):
    """Records that batches are made of, but not such batches."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3), index


class OwnSGD(torch.optim.SGD):
    """An optimizer of the user."""

    turns = 3


# the strategy, by keywords
fleet.DistributedStrategy(a_snyc=True)  # call-arg
fleet.DistributedStrategy(a_sync="yes")  # arg-type
fleet.DistributedStrategy(a_sync_configs={"k_stps": 4})  # arg-type
fleet.DistributedStrategy(a_sync_configs={"k_steps": "4"})  # arg-type
fleet.DistributedStrategy(lars=True)  # call-arg
fleet.DistributedStrategy(a_sync=True, a_sync_configs={"k_steps": 4}, fuse_grad_size_in_MB=50)
fleet.DistributedStrategy(use_local_sgd=True, local_sgd_steps=4, ssl=None, fp16_allreduce="bf16")

# by attributes
strategy = fleet.DistributedStrategy()
strategy.a_synk = True  # attr-defined
strategy.sharding = True  # attr-defined
strategy.a_sync_configs.k_stps = 3  # attr-defined
strategy.a_sync_configs.k_steps = "3"  # assignment
strategy.a_sync_configs = {"k_stps": 4}  # assignment
print(strategy.a_synk)  # attr-defined
strategy.a_sync = True
strategy.a_sync_configs.k_steps = 3
strategy.a_sync_configs = {"k_steps": 4, "staleness": None}
strategy.exec_strategy = fleet.static.ExecutionStrategy(num_threads=2)
strategy.execution_strategy = {"num_threads": 3}
strategy.exec_strategy.num_threads = 4
fleet.static.ExecutionStrategy(num_thread=2)  # call-arg
steps: int = strategy.localsgd_configs.k_steps

# the names
fleet.nope()  # attr-defined
fleet.get_rank()  # attr-defined
fleet.static.nope()  # attr-defined
fleet.util.nope()  # attr-defined
fleet.metrics.nope()  # attr-defined
fleet.init(is_collective=True, strategy=strategy)
index: int = fleet.worker_index() + fleet.rank()
program: fleet.static.Program = fleet.main_program
error: type[Exception] = fleet.errors.StrategyError

# the model keeps its class, the optimizer gets a method
model = fleet.distributed_model(nn.Linear(3, 1))
bias: Tensor = model.bias
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(optimizer, strategy)
own = OwnSGD(model.parameters(), lr=0.1)
own = fleet.distributed_optimizer(own)
loss = model(torch.ones(3)).sum()
optimizer.minimize(loss)
optimizer.minimize("loss")  # arg-type
optimizer.minimize(loss, clip_norm="1")  # arg-type
optimizer.step()
optimizer.zero_grad(set_to_none="yes")  # arg-type
own.minimize(loss)
own.turns += 1
fleet.distributed_optimizer(fleet.optim.Lars(model.named_parameters(), 0.1)).minimize(loss)
fleet.distributed_optimizer(model)  # arg-type
torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)

# batches
for tensors in fleet.shard(DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8)), 2)):
    tensors[0].nope()  # attr-defined
    tensors[0].sum()


def each(loader: DataLoader[Clicks]) -> None:
    """Batches of a named tuple."""
    sharded = fleet.shard(loader)
    sharded.set_epoch("1")  # arg-type
    for batch in sharded:
        batch.idz.sum()  # attr-defined
        batch.ids.sum()
    for batch in fleet.progress(sharded):
        batch.idz.sum()  # attr-defined


for images, labels in fleet.shard(DataLoader(Images(), 2)):
    print(images.sum(), labels.sum())
