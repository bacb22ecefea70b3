# SPDX-License-Identifier: Apache-2.0
"""Refuses to train where no optimizer is registered: the servers would get no gradients.

Torch's own optimizer would step the worker's copies only. A script that only evaluates needs no
optimizer, so the check runs at the first gradient of a parameter.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fleetlight.errors import PlanError
from fleetlight.fleet.job import Job


class MissingOptimizer:
    """Watches the parameters of a model for gradients that no registered optimizer applies."""

    def __init__(self, module: nn.Module, job: Job) -> None:
        self._job = job
        self._handles: list[RemovableHandle] = []
        if not job.optimizers:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._refuse)  # type: ignore[no-untyped-call]
                for parameter in module.parameters()
                if parameter.requires_grad
            ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuse(self, _: Tensor) -> None:
        if self._job.optimizers:
            return  # its step raises that it was registered too late
        raise PlanError(
            "backward computed gradients, but no optimizer is registered, so the parameter servers "
            "would never receive them; add optimizer = fleet.distributed_optimizer(optimizer) "
            "before fleet.init_worker() and fleet.init_server() (a script that only evaluates "
            "needs none, but no backward either)"
        )
