# SPDX-License-Identifier: Apache-2.0
"""`ReducedSteps`: every worker makes each step itself, with gradients that all have reduced."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.fleet.protocols import RegisteredModel
from fleetlight.fleet.training.compression import refuse_scaler
from fleetlight.fleet.training.local_training import LocalTraining, local_training_of
from fleetlight.fleet.training.optimizer import ManagedOptimizer, closure_in, with_closure

if TYPE_CHECKING:
    from fleetlight.collective.local_training.engine import LocalTrainingEngine
    from fleetlight.static.program import Program
    from fleetlight.static.writing.recorder import Part


class ProgramSteps(Protocol):
    """Steps made by programs; implemented by the module `collective.programs`."""

    def register(self, managed: ManagedOptimizer, program: Program) -> Collection[Part]:
        """Register a program; return the parts of its training that this process writes."""

    def distribute(self, managed: ManagedOptimizer, steps: ReducedSteps, program: Program) -> None:
        """Rewrite a program according to the strategy, so that all workers make its steps."""


class ReducedSteps:
    """The policy of optimizers in collective jobs, with local training where asked."""

    def __init__(self, managed: ManagedOptimizer, programs: Callable[[], ProgramSteps]) -> None:
        self._programs = programs
        self.managed, self.optimizer, self.job = managed, managed.optimizer, managed.job
        self._trained_ids: set[int] | None = None
        #: set once training begins
        self.local_steps: LocalTraining | None = None
        self._has_begun = False
        #: loads a checkpoint into the engine of local training, once there is one
        self._pending_load: Callable[[LocalTrainingEngine], None] | None = None
        #: the models that it steps; set at its first step
        self.models: list[RegisteredModel] = []
        #: True when the replicas of the models must be rebuilt at the next average
        self._is_outdated = False
        #: by model: the number of reductions at the last step
        self._used: dict[RegisteredModel, int] = {}

    def register(self, program: Program) -> Collection[Part]:
        return self._programs().register(self.managed, program)

    def distribute(self, program: Program) -> None:
        self._programs().distribute(self.managed, self, program)

    def release(self) -> None:
        """Nothing of the optimizer was changed here."""

    @property
    def steps_on_servers(self) -> None:
        """Workers step."""

    def count_on_servers(self, steps: int) -> None:
        """Workers step."""

    @property
    def by_program(self) -> bool:
        return self.managed.program is not None

    def before_program_step(self) -> None:
        """Prepare the step of a program."""
        self.begin()
        if self.local_steps is not None:
            self._update_trained()
            self.local_steps.before_step()

    def count_step(self, loss: Tensor | None = None) -> None:
        """Count the step of a program; with its loss if `local_steps.wants_loss` was True."""
        if loss is not None and self.job.loss_probe is not None:
            self.job.loss_probe.see(loss)
        self.after()

    def begin(self) -> None:
        """Start local training, if the strategy asks for it, when training begins; once."""
        if self._has_begun:
            return
        self._has_begun = True
        self.local_steps = local_training_of(self)
        if self.local_steps is not None and self._pending_load is not None:
            self._pending_load(self.local_steps.engine)
            self._pending_load = None

    def resume_local(self, load: Callable[[LocalTrainingEngine], None]) -> None:
        if self.local_steps is not None:
            load(self.local_steps.engine)
        else:
            self._pending_load = load

    @property
    def trains_locally(self) -> bool:
        """True when the worker makes the next step alone."""
        return self.local_steps is not None and self.local_steps.next_is_local

    def steps_some_of(self, model: RegisteredModel) -> bool:
        """True when it steps a parameter of the model."""
        if self._trained_ids is not None:
            return model in self.models
        return model.has_any_of(p for group in self.optimizer.param_groups for p in group["params"])

    def before(self, args: Any, kwargs: Any) -> Any:
        self._refuse_beside_program()
        # a closure computes gradients again: those that exist now are from an earlier step
        self.make_ready(takes_assigned=closure_in(args, kwargs) is None)
        refuse_scaler(self.models)
        return self._with_common_loss(args, kwargs)

    def _refuse_beside_program(self) -> None:
        if self.managed.program is not None and not self.job.group.alone:
            raise PlanError(
                "optimizer.step was called, but a program makes the steps of this optimizer, and "
                "the workers reduce its gradients; run the program, or train eagerly with another "
                "optimizer and another model"
            )

    def make_ready(self, *, takes_assigned: bool = True) -> None:
        """Reduce the gradients of all workers and of all merged backwards."""
        for model in self.job.models:
            model.freeze()  # also when its own forward was never called
            model.begin_training()
        self._update_trained()
        if self.managed.merge is not None:
            self.managed.merge.complete()
        if self.local_steps is not None:
            self.local_steps.before_step()
            if self.local_steps.next_is_local:
                return
        for model in self.models:
            if model.replica is not None:
                used = self._used.get(model, 0) if takes_assigned else -1
                model.replica.ensure_reduced(expected=self.managed.merge is not None, used=used)

    def update_trained(self, model: RegisteredModel) -> None:
        """Agree again now, not at the step, if other parameters of the model are trained.

        None of them for now, as where two models train against each other, is no change.
        """
        if self._trained_ids is None:
            return
        theirs = {id(p) for p in model.module.parameters()}
        trainable = self._trainable()
        found = trainable.keys() & theirs
        if found and found != self._trained_ids & theirs:
            self._set_trained(trainable)

    def _update_trained(self) -> None:
        trainable = self._trainable()
        if trainable.keys() != self._trained_ids:
            self._set_trained(trainable)

    def _trainable(self) -> dict[int, Tensor]:
        return {
            id(p): p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }

    def _set_trained(self, trainable: dict[int, Tensor]) -> None:
        """Find the models it steps; those whose parameters have changed are agreed on again."""
        # agreement broadcasts the values of worker 0, and local training would lose the others'
        agreed = self._trained_ids is None or not self.trains_locally
        if self._trained_ids is not None:
            self._is_outdated = True
            if agreed:
                self._rebuild_replicas()
        self._trained_ids = set(trainable)
        self._check_parameters(self._trained_ids)
        if self.local_steps is not None:
            self.local_steps.engine.trains(trainable.values(), agreed=agreed)

    def _rebuild_replicas(self) -> None:
        if self._is_outdated:
            self._is_outdated = False
            for model in self.models:
                model.rebuild_replica()

    def average_early(self) -> None:
        """Average the parameters of local training now; every worker calls it."""
        if self.local_steps is not None and self.local_steps.average_early():
            self._rebuild_replicas()

    def _with_common_loss(self, args: Any, kwargs: Any) -> Any:
        """Average the loss of a closure: optimizers that depend on it must see equal losses."""
        group = self.job.group
        closure = closure_in(args, kwargs)
        if closure is None or group.alone or self.trains_locally:
            return None

        def common() -> Any:
            loss = closure()
            for model in self.models:
                if model.replica is not None:
                    # the closure may call parts of the model, or the model in eval mode
                    model.replica.ensure_reduced()
            if not isinstance(loss, Tensor):
                return loss
            return group.all_reduce(loss.detach().clone()) / group.size

        return with_closure(args, kwargs, common)

    def after(self) -> None:
        job = self.job
        job.count_step()
        for model in self.models:
            if model.replica is not None:
                self._used[model] = model.reductions_at_step = model.replica.reductions
                model.replica.stepped()
        job.group.report_step(job.step)
        if self.local_steps is not None and self.local_steps.step_made():
            self._rebuild_replicas()
        if job.dense_group is not None:
            # an average after the step counts as a part of it
            job.dense_group.meter.count_step()
        if job.autosave is not None:
            job.autosave.step_made()

    def _check_parameters(self, mine: set[int]) -> None:
        """PlanError for parameters outside of all registered models: they would drift apart."""
        known: set[int] = set()
        self.models = []
        for model in self.job.models:
            ids = {id(p) for p in model.module.parameters()}
            known |= ids
            if ids & mine:
                self.models.append(model)
        unregistered = 0 if self.job.group.alone else len(mine - known)
        if unregistered:
            raise PlanError(
                f"{unregistered} parameters of the optimizer are in no distributed model, so they "
                "would differ between workers; add model = fleet.distributed_model(model) for each "
                "model they belong to"
            )
