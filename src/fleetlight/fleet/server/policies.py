# SPDX-License-Identifier: Apache-2.0
"""`IdlePolicy` and `IdleSteps`: models and optimizers in a parameter server, which trains none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

from fleetlight.collective.local_training.engine import LocalTrainingEngine
from fleetlight.errors import PlanError
from fleetlight.fleet.protocols import LocalSteps, RegisteredModel
from fleetlight.fleet.served.steps import ServedPrograms
from fleetlight.fleet.training.model import ManagedModel
from fleetlight.fleet.training.optimizer import ManagedOptimizer

if TYPE_CHECKING:
    from fleetlight.static.program import Program
    from fleetlight.static.writing.recorder import Part


class IdlePolicy:
    """The policy of models in a parameter server, which does not train."""

    watches_calls: ClassVar[bool] = True

    def agree(self, model: ManagedModel) -> None:
        """There is no forward."""

    def run(self, model: ManagedModel, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise PlanError(
            "the model was called in a parameter server, where nothing trains; call it where "
            "fleet.is_worker() is true"
        )

    def weight(self, model: ManagedModel) -> float:
        return model.batch_weight

    def means(self, model: ManagedModel) -> None:
        """A server takes no part in averages."""

    def close(self) -> None:
        """There is nothing to close."""


class IdleSteps:
    """The policy of optimizers in a parameter server, which does not train."""

    local_steps: LocalSteps | None = None

    def __init__(self, managed: ManagedOptimizer, programs: Callable[[], ServedPrograms]) -> None:
        self.managed, self._programs = managed, programs

    @property
    def steps_on_servers(self) -> None:
        """A server makes the steps of all workers, and counts none here."""

    def count_on_servers(self, steps: int) -> None:
        """A server counts no steps here."""

    def begin(self) -> None:
        """The strategy is in the plan of the server."""

    def resume_local(self, load: Callable[[LocalTrainingEngine], None]) -> None:
        """There is no local training."""

    def update_trained(self, model: RegisteredModel) -> None:
        """There is no forward."""

    def make_ready(self) -> None:
        """A server has no gradients."""

    def before(self, args: Any, kwargs: Any) -> Any:
        raise PlanError(
            "optimizer.step was called in a parameter server, where nothing trains; call it where "
            "fleet.is_worker() is true"
        )

    def after(self) -> None:
        """There is no step."""

    def register(self, program: Program) -> Collection[Part]:
        """Register a program; return the parts of its training that this process writes."""
        self._programs().register(self.managed, program)
        return ()

    def distribute(self, program: Program) -> None:
        self._programs().distribute(self.managed, program)

    def release(self) -> None:
        """Nothing was changed."""
