# SPDX-License-Identifier: Apache-2.0
"""`ReducedSteps`: steps that every worker makes itself, with gradients that all have reduced."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.fleet.protocols import RegisteredModel
from fleetlight.fleet.training.compression import refuse_scaler
from fleetlight.fleet.training.local_training import LocalTraining, alone_of
from fleetlight.fleet.training.optimizer import StepPlan, closure_in

if TYPE_CHECKING:
    from fleetlight.collective.local_training.engine import LocalTrainingEngine
    from fleetlight.static.program import Program
    from fleetlight.static.writing.recorder import Part


class ProgramSteps(Protocol):
    """How programs make the steps of an optimizer; the module `collective.programs`."""

    def takes(self, plan: StepPlan, program: Program) -> Collection[Part]:
        """What of a program's training this process writes."""

    def distribute(self, plan: StepPlan, steps: ReducedSteps, program: Program) -> None:
        """Rewrite a program as the strategy says, and have its steps made by all workers."""


class ReducedSteps:
    """The policy of optimizers in collective jobs, which may also train alone for a while."""

    def __init__(self, plan: StepPlan, programs: Callable[[], ProgramSteps]) -> None:
        self._programs = programs
        self.plan, self.optimizer, self.job = plan, plan.optimizer, plan.job
        self._known: set[int] | None = None
        #: how its steps are made alone, if they ever are
        self.alone: LocalTraining | None = None
        self._has_asked_alone = False
        #: takes the engine of that to where a checkpoint was
        self._go_on: Callable[[LocalTrainingEngine], None] | None = None
        #: those that it steps, known at its first step
        self.models: list[RegisteredModel] = []
        #: True when the workers are to agree anew on these when they meet
        self._is_outdated = False
        #: how many reductions of each model there had been at the last step
        self._used: dict[RegisteredModel, int] = {}

    def takes(self, program: Program) -> Collection[Part]:
        """As in `StepPolicy`."""
        return self._programs().takes(self.plan, program)

    def distribute(self, program: Program) -> None:
        """As in `StepPolicy`."""
        self._programs().distribute(self.plan, self, program)

    def release(self) -> None:
        """The plan takes its hooks back."""

    @property
    def steps_on_servers(self) -> None:
        """Workers step."""

    def count_on_servers(self, steps: int) -> None:
        """Workers step."""

    @property
    def by_program(self) -> bool:
        """As in `AloneOrTogether`."""
        return self.plan.program is not None

    def before_program_step(self) -> None:
        """A program is about to make a step."""
        self.begin()
        if self.alone is not None:
            self._look_at_parameters()
            self.alone.before_step()

    def count_step(self, loss: Tensor | None = None) -> None:
        """A program has made a step; with the loss if `alone.wants_loss` was true before."""
        if loss is not None and self.job.loss_probe is not None:
            self.job.loss_probe.see(loss)
        self.after()

    def begin(self) -> None:
        """Find out whether it makes steps alone, when training begins; once."""
        if self._has_asked_alone:
            return
        self._has_asked_alone = True
        self.alone = alone_of(self)
        if self.alone is not None and self._go_on is not None:
            self._go_on(self.alone.engine)
            self._go_on = None

    def go_on(self, there: Callable[[LocalTrainingEngine], None]) -> None:
        """Values of a checkpoint were loaded: what trains alone goes on from there."""
        if self.alone is not None:
            there(self.alone.engine)
        else:
            self._go_on = there

    @property
    def trains_alone(self) -> bool:
        """True when the coming step is made without the other workers."""
        return self.alone is not None and self.alone.now

    def trains_some_of(self, model: RegisteredModel) -> bool:
        """Whether it steps a parameter of the model."""
        if self._known is not None:
            return model in self.models
        return model.has_any_of(p for group in self.optimizer.param_groups for p in group["params"])

    def before(self, args: Any, kwargs: Any) -> Any:
        """As in `StepPolicy`."""
        self._refuse_beside_program()
        # with a closure, those that are there were used before, and will be made anew
        self.make_ready(takes_assigned=closure_in(args, kwargs) is None)
        refuse_scaler(self.models)
        return self._with_common_loss(args, kwargs)

    def _refuse_beside_program(self) -> None:
        if self.plan.program is not None and not self.job.group.alone:
            raise PlanError(
                "optimizer.step was called, but the steps of this optimizer are made by a program, "
                "whose gradients the workers reduce; run the program, or train eagerly with an "
                "optimizer and a model of their own"
            )

    def make_ready(self, *, takes_assigned: bool = True) -> None:
        """After this, the gradients are those of all workers and of all merged backwards."""
        for plan in self.job.models:
            plan.freeze()  # also when its own forward was never called
            plan.begin()
        self._look_at_parameters()
        if self.plan.merge is not None:
            self.plan.merge.complete()
        if self.alone is not None:
            self.alone.before_step()
            if self.alone.now:
                return
        for plan in self.models:
            if plan.replica is not None:
                used = self._used.get(plan, 0) if takes_assigned else -1
                plan.replica.ensure_reduced(expected=self.plan.merge is not None, used=used)

    def notice_changes(self, model: RegisteredModel) -> None:
        """Agree anew now, instead of at the step, if it has begun and trains others of the model.

        None of them for now, as where two models train against each other, is no change.
        """
        if self._known is None:
            return
        theirs = {id(p) for p in model.module.parameters()}
        trainable = self._trainable()
        found = trainable.keys() & theirs
        if found and found != self._known & theirs:
            self._know(trainable)

    def _look_at_parameters(self) -> None:
        trainable = self._trainable()
        if trainable.keys() != self._known:
            self._know(trainable)

    def _trainable(self) -> dict[int, Tensor]:
        return {
            id(p): p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }

    def _know(self, trainable: dict[int, Tensor]) -> None:
        """Find the models it steps; those whose parameters have changed agree anew."""
        # to agree is to begin with equal values: workers that are apart would lose theirs
        agreed = self._known is None or not self.trains_alone
        if self._known is not None:
            self._is_outdated = True
            if agreed:
                self._agree_anew()
        self._known = set(trainable)
        self._check_parameters(self._known)
        if self.alone is not None:
            self.alone.engine.trains(trainable.values(), agreed=agreed)

    def _agree_anew(self) -> None:
        if self._is_outdated:
            self._is_outdated = False
            for plan in self.models:
                plan.replicate_again()

    def meet_early(self) -> None:
        """Let workers that train alone be equal now. All of them come here."""
        if self.alone is not None and self.alone.meet_early():
            self._agree_anew()

    def _with_common_loss(self, args: Any, kwargs: Any) -> Any:
        """Optimizers that decide by the loss of a closure must see the same loss everywhere."""
        group = self.job.group
        closure = closure_in(args, kwargs)
        if closure is None or group.alone or self.trains_alone:
            return None

        def common() -> Any:
            loss = closure()
            for plan in self.models:
                if plan.replica is not None:
                    # of parts of the model, or of its own forward in eval mode
                    plan.replica.ensure_reduced()
            if not isinstance(loss, Tensor):
                return loss
            return group.all_reduce(loss.detach().clone()) / group.size

        return (args[0], common), {k: v for k, v in kwargs.items() if k != "closure"}

    def after(self) -> None:
        """As in `StepPolicy`."""
        job = self.job
        job.step += 1
        for plan in self.models:
            if plan.replica is not None:
                self._used[plan] = plan.stepped = plan.replica.reductions
                plan.replica.stepped()
        job.group.tell_step(job.step)
        if self.alone is not None and self.alone.step_made():
            self._agree_anew()
        if job.dense_group is not None:
            # a meeting behind the step is a part of what it costs
            job.dense_group.account.count_step()
        if job.stopping is not None:
            job.stopping.step_made()

    def _check_parameters(self, mine: set[int]) -> None:
        """A parameter outside every registered model would drift apart on the workers."""
        known: set[int] = set()
        self.models = []
        for plan in self.job.models:
            ids = {id(p) for p in plan.module.parameters()}
            known |= ids
            if ids & mine:
                self.models.append(plan)
        strangers = 0 if self.job.group.alone else len(mine - known)
        if strangers:
            raise PlanError(
                f"{strangers} parameters of the optimizer belong to no distributed model, so they "
                "would differ between workers; add model = fleet.distributed_model(model) for each "
                "model they come from"
            )
