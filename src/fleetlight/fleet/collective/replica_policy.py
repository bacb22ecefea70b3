# SPDX-License-Identifier: Apache-2.0
"""`ReplicaPolicy`: a model whose gradients the workers reduce while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fleetlight.collective.data_parallel.replica import Replica
from fleetlight.collective.data_parallel.sink import weighted
from fleetlight.collective.local_training.outer import Means
from fleetlight.fleet.training.model import ManagedModel, explain_deadline

#: a missing worker often skips an evaluation that others make
_AT_FIRST_FORWARD = (
    "The first forward of a model waits for all workers; where only some of them make it, let all "
    "call fleet.init_worker() first"
)


class ReplicaPolicy:
    """The policy of models in collective jobs."""

    watches_calls: ClassVar[bool] = True

    def agree(self, model: ManagedModel) -> None:
        if not model.job.group.alone:
            model.warn_of_other_device()
            with explain_deadline(_AT_FIRST_FORWARD):
                model.replicate()

    def run(self, model: ManagedModel, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        replica = model.replica
        if replica is None or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        alone = model.trains_locally
        # in local training a short batch counts like any other, and a repeated one counts for zero
        factor = float(model.batch_weight > 0) if alone else replica.factor
        if not model.module.training:
            replica.evaluated()
            return weighted(inner, args, kwargs, factor)
        if replica.compression is not None:
            replica = _up_to_date(model, replica)
        reduces = model.reduces
        replica.before_forward((args, kwargs), reduces, alone=alone)
        return replica.after_forward(weighted(inner, args, kwargs, factor), reduces)

    def weight(self, model: ManagedModel) -> float:
        return model.batch_weight

    def means(self, model: ManagedModel) -> Means | None:
        return model.replica

    def close(self) -> None:
        """The model closes its replica."""


def _up_to_date(model: ManagedModel, replica: Replica) -> Replica:
    """Agree again now: at the step, as without compression, gradients would be encoded twice."""
    for optimizer in model.job.optimizers:
        optimizer.update_trained(model)
    return model.replica or replica
