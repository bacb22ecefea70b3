# SPDX-License-Identifier: Apache-2.0
"""The dense parameters of a model on several servers, without workers or a network."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.ps.dtypes import NAMES
from fleetlight.ps.placement import Placement
from fleetlight.ps.plan import SYNC, DensePlan, Plan
from fleetlight.ps.tables.dense import DenseBlocks
from fleetlight.ps.tables.optimizers import optimizer_plan, push_options
from fleetlight.ps.worker.local_parameters import LocalParameters


def plan_of(
    parameters: Sequence[Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    servers: int,
    mode: str = SYNC,
) -> Plan:
    """A plan of dense parameters; `parameters` are those of the optimizers."""
    places = {
        id(p): (number, index)
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    dense = [
        DensePlan(f"p{n}", tuple(p.shape), NAMES[p.dtype], *places[id(p)])
        for n, p in enumerate(parameters)
    ]
    return Plan(
        mode=mode,
        worker_num=1,
        server_num=servers,
        seed=0,
        tables=[],
        dense=dense,
        optimizers=[optimizer_plan(optimizer) for optimizer in optimizers],
    )


class DenseServers:
    """The dense blocks of all servers of a job."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        servers: int,
        mode: str = SYNC,
    ) -> None:
        self.optimizers = list(optimizers)
        self.parameters = list(parameters)
        self.plan = plan_of(parameters, optimizers, servers, mode)
        self.placement = Placement(self.plan)
        self.servers = [
            DenseBlocks.build(self.plan, self.placement, server, optimizers, parameters)
            for server in range(servers)
        ]

    def step(self, number: int = 0) -> None:
        """Send the gradients of the parameters and the current options."""
        options = [push_options(group) for group in self.optimizers[number].param_groups]
        gradients = {n: _flat(p.grad) for n, p in enumerate(self.parameters)}
        absent = {n for n, g in gradients.items() if g is None}
        live = LocalParameters(self.parameters)
        for server, blocks in enumerate(self.servers):
            mine = self.placement.blocks_of(server, number)
            blocks.step(number, options, absent, [live.pack(b, gradients) for b in mine])

    def take(self) -> None:
        """Copy the servers' values into the parameters."""
        live = LocalParameters(self.parameters)
        for server, blocks in enumerate(self.servers):
            for block, values in zip(
                self.placement.blocks_of(server), blocks.values(), strict=True
            ):
                live.unpack(block, values)


def _flat(gradient: Tensor | None) -> NDArray[Any] | None:
    if gradient is None:
        return None
    flat = gradient.reshape(-1)
    if flat.dtype == torch.bfloat16:
        return np.array(flat.view(torch.uint16).numpy())
    return np.array(flat.numpy())
