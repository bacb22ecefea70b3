# SPDX-License-Identifier: Apache-2.0
"""Refuses a registered model that another library distributes too: gradients travel once.

Torch's DistributedDataParallel, and Accelerate, Lightning and the Trainer of transformers with it,
wrap a model when they find several processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fleetlight.errors import PlanError
from fleetlight.torch_compat.wrappers import wrappers_in, wrappers_of


def refuse_running_wrapper(module: nn.Module) -> None:
    """Within a forward: whether the one who calls it is such a wrapper."""
    _refuse(wrappers_of(module))


def refuse_wrappers(module: nn.Module) -> None:
    """Before the workers agree on the model: what is in it, or has its parameters."""
    _refuse(wrappers_in(module))


def _refuse(found: Iterable[str]) -> None:
    for name in found:
        raise PlanError(
            f"the model is registered by fleet.distributed_model, and {name} distributes it too: "
            "gradients would be reduced twice. Drop one of them: the line that wraps the model "
            "(with Accelerate accelerator.prepare(model), with the Trainer of transformers its "
            "training loop; docs/migrating.md, 'Accelerate, the Trainer and Lightning', shows what "
            "to write instead), or "
            "fleet.distributed_model(model) and fleet.distributed_optimizer(optimizer)"
        )
