# SPDX-License-Identifier: Apache-2.0
"""`Replicating`: a model whose gradients the workers reduce while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fleetlight.collective.data_parallel.replica import Replica
from fleetlight.collective.data_parallel.sink import weighted
from fleetlight.collective.local_training.outer import Means
from fleetlight.fleet.training.model import ModelPlan, saying_who_meets

#: an absent worker is often one that does not evaluate where another does
_AT_FIRST_FORWARD = (
    "At the first forward of a model all workers meet; where only some of them call it first, let "
    "all call fleet.init_worker() before"
)


class Replicating:
    """The policy of models in collective jobs."""

    watches_calls: ClassVar[bool] = True

    def agree(self, plan: ModelPlan) -> None:
        """As in `ModelPolicy`."""
        if not plan.job.group.alone:
            plan.warn_of_other_device()
            with saying_who_meets(_AT_FIRST_FORWARD):
                plan.replicate()

    def run(self, plan: ModelPlan, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As in `ModelPolicy`."""
        replica = plan.replica
        if replica is None or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        alone = plan.trains_alone
        # alone, a short batch is like any other; only one that repeats a record counts for nothing
        factor = float(plan.batch_weight > 0) if alone else replica.factor
        if not plan.module.training:
            replica.evaluated()
            return weighted(inner, args, kwargs, factor)
        if replica.compression is not None:
            replica = _up_to_date(plan, replica)
        reduces = plan.reduces
        replica.before_forward((args, kwargs), reduces, alone=alone)
        return replica.after_forward(weighted(inner, args, kwargs, factor), reduces)

    def weight(self, plan: ModelPlan) -> float:
        """As in `ModelPolicy`; the replica applies it."""
        return plan.batch_weight

    def means(self, plan: ModelPlan) -> Means | None:
        """As in `ModelPolicy`."""
        return plan.replica

    def close(self) -> None:
        """The plan closes its replica."""


def _up_to_date(plan: ModelPlan, replica: Replica) -> Replica:
    """To agree anew at the step, as is done else, would be to encode gradients twice."""
    for optimizer in plan.job.optimizers:
        optimizer.notice_changes(plan)
    return plan.replica or replica
