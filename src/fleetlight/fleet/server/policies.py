# SPDX-License-Identifier: Apache-2.0
"""`IdlePolicy` and `IdleSteps`: models and optimizers in a parameter server, which trains none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

from fleetlight.collective.local_training.engine import LocalTrainingEngine
from fleetlight.errors import PlanError
from fleetlight.fleet.protocols import LocalSteps, RegisteredModel
from fleetlight.fleet.served.steps import ServedPrograms
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import StepPlan

if TYPE_CHECKING:
    from fleetlight.static.program import Program
    from fleetlight.static.writing.recorder import Part


class IdlePolicy:
    """The policy of models in a parameter server, which does not train."""

    watches_calls: ClassVar[bool] = True

    def agree(self, plan: ModelPlan) -> None:
        """A forward opens nothing."""

    def run(self, plan: ModelPlan, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Refuse."""
        raise PlanError("the model was called in a parameter server; servers do not train")

    def weight(self, plan: ModelPlan) -> float:
        """As in `ModelPolicy`."""
        return plan.batch_weight

    def means(self, plan: ModelPlan) -> None:
        """Nobody does."""

    def close(self) -> None:
        """There is nothing to let go of."""


class IdleSteps:
    """The policy of optimizers in a parameter server, which does not train."""

    alone: LocalSteps | None = None

    def __init__(self, plan: StepPlan, programs: Callable[[], ServedPrograms]) -> None:
        self.plan, self._programs = plan, programs

    @property
    def steps_on_servers(self) -> None:
        """A server makes the steps of all workers, and counts none of its own."""

    def count_on_servers(self, steps: int) -> None:
        """As above."""

    def begin(self) -> None:
        """A server learns the strategy with its plan."""

    def go_on(self, there: Callable[[LocalTrainingEngine], None]) -> None:
        """Nothing trains alone."""

    def notice_changes(self, model: RegisteredModel) -> None:
        """A server sees no forward."""

    def make_ready(self) -> None:
        """A server has no gradients."""

    def before(self, args: Any, kwargs: Any) -> Any:
        """Refuse."""
        raise PlanError("optimizer.step was called in a parameter server; servers do not train")

    def after(self) -> None:
        """No step comes so far."""

    def takes(self, program: Program) -> Collection[Part]:
        """The program's model belongs to the plan; nothing of its training is written."""
        self._programs().takes(self.plan, program)
        return ()

    def distribute(self, program: Program) -> None:
        """As in `StepPolicy`."""
        self._programs().distribute(self.plan, program)

    def release(self) -> None:
        """Nothing was changed."""
