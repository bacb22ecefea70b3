# SPDX-License-Identifier: Apache-2.0
"""Refuses to train where no optimizer is registered: the servers would never hear of it.

Torch's own optimizer would then step a private copy of the worker. A script that only evaluates
needs no optimizer, so the first gradient of a parameter is what is refused.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fleetlight.errors import PlanError
from fleetlight.fleet.job import Job


class MissingOptimizer:
    """Watches the parameters of a model for gradients that no registered optimizer takes."""

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
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _refuse(self, _: Tensor) -> None:
        if self._job.optimizers:
            return  # registered too late, which its step says
        raise PlanError(
            "backward made gradients, but no optimizer is registered, so the parameter servers "
            "would never get them; add optimizer = fleet.distributed_optimizer(optimizer) before "
            "fleet.init_worker() and fleet.init_server() (evaluation needs none: leave backward "
            "out)"
        )
