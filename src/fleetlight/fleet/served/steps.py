# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers of a job with parameter servers: gradients go there, values come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fleetlight.collective.data_parallel.sink import weighted
from fleetlight.collective.local_training.outer import Means
from fleetlight.errors import PlanError
from fleetlight.fleet.collective.replicating import Replicating
from fleetlight.fleet.plan.bound_plan import mode_of
from fleetlight.fleet.protocols import LocalSteps, RegisteredModel
from fleetlight.fleet.served.figures import geo_warnings
from fleetlight.fleet.served.missing_optimizer import MissingOptimizer
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.training.compression import refuse_scaler
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import StepPlan
from fleetlight.observe.log import logger
from fleetlight.ps.layers.table_gradient import TableGradient
from fleetlight.ps.plan import GEO
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.torch_compat.optimizers import (
    foreach_unscale_,
    is_scaled_by,
    leave_scaling_to_step,
    tell_infinity,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from fleetlight.collective.local_training.engine import LocalTrainingEngine
    from fleetlight.static.program import Program
    from fleetlight.static.writing.recorder import Part


class ServedPrograms(Protocol):
    """How programs make gradients for an optimizer; the module `served.programs`."""

    def takes(self, plan: StepPlan, program: Program) -> Collection[Part]:
        """What of a program's training this process writes."""

    def distribute(self, plan: StepPlan, program: Program) -> None:
        """Rewrite a program as the strategy says, its lookups last."""


class ServedPolicy:
    """The policy of models whose values parameter servers keep."""

    watches_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        #: where workers reduce dense gradients among themselves
        self._dense = Replicating()
        self._missing: MissingOptimizer | None = None

    def agree(self, plan: ModelPlan) -> None:
        """As in `ModelPolicy`."""
        plan.job.open()
        strategy, peers = plan.job.strategy, plan.job.group
        if mode_of(strategy) == GEO and peers.size > 1 and peers.index == 0:
            for line in geo_warnings([one.optimizer for one in plan.job.optimizers]):
                logger.warning("%s", line)
        self._missing = self._missing or MissingOptimizer(plan.module, plan.job)
        if plan.job.dense_group is not None:
            plan.replicate()

    def run(self, plan: ModelPlan, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A forward, its gradients weighted by the batch. Values change within a step only."""
        if plan.replica is not None or not torch.is_grad_enabled():
            return self._dense.run(plan, inner, args, kwargs)
        return weighted(inner, args, kwargs, plan.batch_weight)

    def weight(self, plan: ModelPlan) -> float:
        """As in `ModelPolicy`."""
        return plan.batch_weight

    def means(self, plan: ModelPlan) -> Means | None:
        """As in `ModelPolicy`."""
        return plan.replica

    def close(self) -> None:
        """Let go of the parameters."""
        if self._missing is not None:
            self._missing.close()


class ServedSteps:
    """The policy of optimizers whose steps are made on the servers.

    torch's own `step` still runs, so that schedulers and hooks see what they expect, but finds no
    gradients: they are put aside while it runs. Under GeoSGD it steps the worker's own values.
    """

    #: no step is made alone
    alone: LocalSteps | None = None

    def __init__(
        self, plan: StepPlan, session: ServerSession, programs: Callable[[], ServedPrograms]
    ) -> None:
        self._programs = programs
        self.plan, self.optimizer, self.job = plan, plan.optimizer, plan.job
        self._opened = session
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._steps = 0
        #: False when the step was skipped by all
        self._applied = True
        #: the norm by which the gradients of the coming step were clipped, if they were
        self.norm: float | None = None
        #: True where a step that is skipped has been skipped for an infinity
        self._infinite = True
        #: where the step in hand is made, should another life of this worker go on from there
        self._moment: ResumePoint | None = None
        #: True when the step in hand is left out, since the servers have it
        self._passes = False
        #: whose infinities make steps a skip
        self._scaling: torch.amp.GradScaler | None = None
        # a loss scaler then leaves it to the step what to do about an infinity, since a step that
        # one worker leaves out must be left out by all
        self._take_scaling_back = leave_scaling_to_step(plan.optimizer)

    def release(self) -> None:
        """As in `StepPolicy`."""
        self._take_scaling_back()

    def begin(self) -> None:
        """The session opens at the first forward or step."""

    def go_on(self, there: Callable[[LocalTrainingEngine], None]) -> None:
        """Nothing trains alone."""

    def notice_changes(self, model: RegisteredModel) -> None:
        """The plan of a job with servers is drawn once."""

    @property
    def steps_on_servers(self) -> int:
        """As in `StepPolicy`."""
        return self._steps

    def count_on_servers(self, steps: int) -> None:
        """As in `StepPolicy`."""
        self._steps = steps

    def takes(self, program: Program) -> Collection[Part]:
        """A program is about to be written that makes gradients for this optimizer."""
        return self._programs().takes(self.plan, program)

    def distribute(self, program: Program) -> None:
        """The program is written."""
        self._programs().distribute(self.plan, program)

    def before(self, args: Any, kwargs: Any) -> Any:
        """As in `StepPolicy`."""
        self._opened.one_trainer.begin()
        try:
            return self._make_step(args, kwargs)
        except BaseException:
            self._opened.one_trainer.end()
            raise

    def make_ready(self) -> None:
        """As in `StepPolicy`; what servers reduce, they do in the step."""
        for plan in self.job.models:
            plan.freeze()
            plan.begin()
        self._reduce()

    def _reduce(self) -> None:
        merge = self.plan.merge
        if merge is not None:
            merge.complete()
        for plan in self.job.models:
            if plan.replica is not None:
                plan.replica.ensure_reduced(expected=merge is not None)

    def _make_step(self, args: Any, kwargs: Any) -> Any:
        for plan in self.job.models:
            plan.freeze()
        session = self._session()
        for plan in self.job.models:
            plan.begin()
        changed = _closure_called(args, kwargs)
        self._reduce()
        refuse_scaler(self.job.models)
        skip = self._unscale()
        # A norm is that of all who take part in a step: where it is a number, nobody had an
        # infinity, and a skip means that somebody has cleared what was clipped.
        norm, self.norm = self.norm, None
        self._infinite = skip or norm is None or not math.isfinite(norm)
        replay, number = session.replay, session.number_of(self.optimizer)
        if replay.passes(number):
            self._passes, self._applied = True, replay.has_applied
            self._put_aside(everything=True)
            return changed
        self._moment = replay.moment(number)
        update = session.collect(self.optimizer, self._steps)
        update.skip = skip
        if session.drawn.plan.workers_step_dense:
            # before torch's own step, which would keep what is not finite
            update.skip = skip or session.skips(update)
            self._put_aside(everything=update.skip)
            self._pending = update
        else:
            self._applied = session.step(update, self._moment)
            self._put_aside(everything=session.drawn.plan.serves_dense or not self._applied)
        return changed

    def after(self) -> None:
        """As in `StepPolicy`."""
        try:
            self._end_step()
        finally:
            self._opened.one_trainer.end()

    def _end_step(self) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside.clear()
        session = self._session()
        passes, self._passes = self._passes, False
        if session.drawn.plan.workers_step_dense and not passes:
            self._applied = session.step(self._pending, self._moment)
        if self._scaling is not None and not self._applied and self._infinite:
            # it may have been another worker's infinity; the scales stay the same everywhere
            tell_infinity(self._scaling, self.optimizer)
        if passes:
            session.replay.passed(session.number_of(self.optimizer))
            self._tell_step()
            return
        # here and nowhere else, as in one process: what forward read, backward finds unchanged
        session.communicator.refresh()
        # the bias correction of Adam counts the steps that were made
        self._steps += self._applied
        self.job.step += self._applied
        self.job.group.tell_step(self.job.step)
        self._tell_step()

    def _tell_step(self) -> None:
        for plan in self.job.models:
            if plan.replica is not None:
                plan.replica.stepped()
        if self.job.stopping is not None:
            self.job.stopping.step_made()

    def update(self) -> Any:
        """The gradients as they stand, before the step."""
        return self._session().collect(self.optimizer, self._steps)

    def _session(self) -> ServerSession:
        if self._opened.is_over:
            raise PlanError("optimizer.step came after fleet.stop_worker: this worker has left")
        self._opened.open(self.job)
        return self._opened

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _put_aside(self, *, everything: bool) -> None:
        """Hide the gradients that torch's own step must not see: those of tables, or all."""
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is not None and (everything or isinstance(gradient, TableGradient)):
                self._aside.append((parameter, gradient))
                parameter.grad = None

    def _attached_scaler(self) -> torch.amp.GradScaler:
        """The scaler that steps the optimizer: all workers must leave the same steps out."""
        for scaler in self.plan.scalers:
            if is_scaled_by(scaler, self.optimizer):
                return scaler
        raise PlanError(
            "a GradScaler steps the optimizer, and is not attached: an infinity of one worker must "
            "lower its scale on all of them; call fleet.attach(scaler=scaler) after making it"
        )

    def _unscale(self) -> bool:
        """Undo a scaler's scale where it has not been; True when it found an infinity."""
        found = getattr(self.optimizer, "found_inf", None)
        scale = getattr(self.optimizer, "grad_scale", None)
        self._scaling = None
        if found is None:
            return False
        self._scaling = self._attached_scaler()
        if scale is not None:
            grads = [p.grad for p in self._parameters() if p.grad is not None]
            foreach_unscale_(grads, found, 1.0 / scale)
        dense_group = self._session().dense_group
        if dense_group is not None:
            # their own steps must be left out together, too
            dense_group.all_reduce(found, "max")
        # torch's own step takes no notice of a scaler here; the scaler deletes them afterwards
        self.optimizer.found_inf = self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        return bool(found.item())


def _closure_called(args: Any, kwargs: Any) -> Any:
    """Call a closure now, since torch's step would only after the gradients were needed."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {k: v for k, v in kwargs.items() if k != "closure"}


def served_programs() -> ServedPrograms:
    """How programs are made; most scripts write none, and need not wait for this import."""
    from fleetlight.fleet.served import programs

    return programs
