# SPDX-License-Identifier: Apache-2.0
"""Policies of models and optimizers in a job with servers, which apply the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fleetlight.collective.data_parallel.sink import weighted
from fleetlight.collective.local_training.outer import Means
from fleetlight.errors import PlanError
from fleetlight.fleet.collective.replica_policy import ReplicaPolicy
from fleetlight.fleet.parts.summaries import geo_warnings
from fleetlight.fleet.plan.bound_plan import mode_of
from fleetlight.fleet.protocols import LocalSteps, RegisteredModel
from fleetlight.fleet.served.missing_optimizer import MissingOptimizer
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.training.compression import refuse_scaler
from fleetlight.fleet.training.model import ManagedModel
from fleetlight.fleet.training.optimizer import ManagedOptimizer, closure_in, with_closure
from fleetlight.observe.log import logger
from fleetlight.ps.layers.table_gradient import TableGradient
from fleetlight.ps.plan import GEO
from fleetlight.ps.update import TableGradients, Update
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
    """Gradients made by programs; implemented by the module `served.programs`."""

    def register(
        self, managed: ManagedOptimizer, program: Program, steps: ServedSteps | None = None
    ) -> Collection[Part]:
        """Register a program; return the parts of its training that this process writes.

        `steps` makes its steps; None in a server.
        """

    def distribute(self, managed: ManagedOptimizer, program: Program) -> None:
        """Rewrite a program according to the strategy, its lookups last."""


class ServedPolicy:
    """The policy of models whose values are on parameter servers."""

    watches_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        #: runs the model where workers reduce dense gradients among themselves
        self._dense = ReplicaPolicy()
        self._missing: MissingOptimizer | None = None

    def agree(self, model: ManagedModel) -> None:
        model.job.open()
        strategy, peers = model.job.strategy, model.job.group
        if mode_of(strategy) == GEO and peers.size > 1 and peers.index == 0:
            for line in geo_warnings([one.optimizer for one in model.job.optimizers]):
                logger.warning("%s", line)
        self._missing = self._missing or MissingOptimizer(model.module, model.job)
        if model.job.dense_group is not None:
            model.replicate()

    def run(self, model: ManagedModel, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward whose gradients the batch weighs; values change within a step only."""
        if model.replica is not None or not torch.is_grad_enabled():
            return self._dense.run(model, inner, args, kwargs)
        return weighted(inner, args, kwargs, model.batch_weight)

    def weight(self, model: ManagedModel) -> float:
        return model.batch_weight

    def means(self, model: ManagedModel) -> Means | None:
        return model.replica

    def close(self) -> None:
        """Stop watching the parameters."""
        if self._missing is not None:
            self._missing.close()


class ServedSteps:
    """The policy of optimizers whose steps are made on the servers.

    Torch's own `step` still runs, for schedulers and hooks, but finds no gradients: they are hidden
    while it runs. Under GeoSGD it steps the worker's own values.
    """

    #: there is no local training
    local_steps: LocalSteps | None = None

    def __init__(
        self,
        managed: ManagedOptimizer,
        session: ServerSession,
        programs: Callable[[], ServedPrograms],
    ) -> None:
        self._programs = programs
        self.managed, self.optimizer, self.job = managed, managed.optimizer, managed.job
        self.session = session
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._steps = 0
        #: False when all workers dropped the step
        self._applied = True
        #: sent after the worker's own step, where workers step dense parameters
        self._pending: Update | None = None
        #: the norm by which the gradients of the next step were clipped, if they were
        self.norm: float | None = None
        #: True where an infinity is the reason for a dropped step
        self._is_infinite = True
        #: the scaler whose infinities drop steps
        self._scaling: torch.amp.GradScaler | None = None
        # let the step, not the scaler, handle an infinity: all workers must drop the same steps
        self._restore_scaling = leave_scaling_to_step(managed.optimizer)

    def release(self) -> None:
        self._restore_scaling()

    def begin(self) -> None:
        """The session opens at the first forward or step."""

    def resume_local(self, load: Callable[[LocalTrainingEngine], None]) -> None:
        """There is no local training."""

    def update_trained(self, model: RegisteredModel) -> None:
        """The plan of a job with servers does not change."""

    @property
    def steps_on_servers(self) -> int:
        return self._steps

    def count_on_servers(self, steps: int) -> None:
        self._steps = steps

    def register(self, program: Program) -> Collection[Part]:
        return self._programs().register(self.managed, program, self)

    def distribute(self, program: Program) -> None:
        self._programs().distribute(self.managed, program)

    def before(self, args: Any, kwargs: Any) -> Any:
        self.session.trainer_guard.begin()
        try:
            return self._make_step(args, kwargs)
        except BaseException:
            self.session.trainer_guard.end()
            raise

    def make_ready(self) -> None:
        """Reduce the gradients that workers reduce; servers reduce theirs in the step."""
        for model in self.job.models:
            model.freeze()
            model.begin_training()
        self._reduce()

    def _reduce(self) -> None:
        merge = self.managed.merge
        if merge is not None:
            merge.complete()
        for model in self.job.models:
            if model.replica is not None:
                model.replica.ensure_reduced(expected=merge is not None)

    def _make_step(self, args: Any, kwargs: Any) -> Any:
        for model in self.job.models:
            model.freeze()
        session = self._open_session()
        for model in self.job.models:
            model.begin_training()
        changed = _closure_called(args, kwargs)
        self._reduce()
        refuse_scaler(self.job.models)
        skip = self._unscale()
        # The norm is that of all workers in the step. If it is finite, no worker had an infinity,
        # and a dropped step means that the script has cleared the clipped gradients.
        norm, self.norm = self.norm, None
        self._is_infinite = skip or norm is None or not math.isfinite(norm)
        self._push(session, skip)
        return changed

    def _push(self, session: ServerSession, skip: bool) -> None:
        """Push the gradients, or check them where torch's own step comes first."""
        update = self._collect(session)
        update.skip = skip
        self._send(session, update)
        plan = session.bound.plan
        steps_dense = not update.skip if plan.workers_step_dense else not plan.serves_dense
        self._hide_gradients(everything=not steps_dense or not self._applied)

    def _send(self, session: ServerSession, update: Update) -> None:
        """Send an update, or keep it until torch's own step has been made."""
        if session.bound.plan.workers_step_dense:
            # checked before torch's own step, which would apply infinities
            update.skip = update.skip or session.drop_nonfinite(update)
            self._pending = update
        else:
            self._applied = session.step(update)

    def _collect(self, session: ServerSession) -> Update:
        return session.collect(self.optimizer, self._steps)

    # -- steps without torch's own

    @property
    def needs_torch(self) -> bool:
        """Whether a step must be one of torch's: it changes values here, or others learn of it."""
        session, managed = self._open_session(), self.managed
        return (
            (session.bound.plan.workers_step_dense and session.steps_dense(self.optimizer))
            or managed.merge is not None
            or session.dense_group is not None
            or getattr(self.optimizer, "found_inf", None) is not None
            or managed.is_watched
        )

    def step_with(
        self, tables: dict[int, TableGradients], dense: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Make a step with these gradients, by number of the table and by parameter."""
        self.session.trainer_guard.begin()
        try:
            session = self._open_session()
            for model in self.job.models:
                model.begin_training()
            self.norm = self._scaling = None
            self._send(session, session.update(self.optimizer, self._steps, tables, dense.get))
            self._finish_push(session)
            self._report_step()
        finally:
            self.session.trainer_guard.end()
            self.managed.note_step()

    def after(self) -> None:
        try:
            self._end_step()
        finally:
            self.session.trainer_guard.end()

    def _end_step(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        self._finish_push(self._open_session())
        self._report_step()

    def _finish_push(self, session: ServerSession) -> None:
        """Push what torch's own step has changed, take the received values, and count the step."""
        if session.bound.plan.workers_step_dense:
            assert self._pending is not None, "before() of the step has not run"
            self._applied = session.step(self._pending)
        self._tell_scaler()
        # only here, as in one process: backward must find the values that forward has read
        session.communicator.refresh()
        # the bias correction of Adam counts applied steps
        self._steps += self._applied
        self.job.count_step(self._applied)
        self.job.group.report_step(self.job.step)

    def _tell_scaler(self) -> None:
        """Report the infinity of a dropped step: the scales stay equal on all workers."""
        if self._scaling is not None and not self._applied and self._is_infinite:
            tell_infinity(self._scaling, self.optimizer)

    def _report_step(self) -> None:
        for model in self.job.models:
            if model.replica is not None:
                model.replica.stepped()
        if self.job.departure is not None:
            self.job.departure.step_made()
        if self.job.autosave is not None:
            self.job.autosave.step_made()

    def update(self) -> Any:
        """The gradients as they stand, before the step."""
        return self._open_session().collect(self.optimizer, self._steps)

    def _open_session(self) -> ServerSession:
        if self.session.is_over:
            raise PlanError(
                "optimizer.step was called after fleet.stop_worker, when this worker had left the "
                "job; stop the worker after its last step"
            )
        self.session.open(self.job)
        return self.session

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _hide_gradients(self, *, everything: bool) -> None:
        """Hide gradients from torch's own step: those of tables, or all."""
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is not None and (everything or isinstance(gradient, TableGradient)):
                self._hidden.append((parameter, gradient))
                parameter.grad = None

    def _attached_scaler(self) -> torch.amp.GradScaler:
        """The attached scaler that steps the optimizer: all workers must drop the same steps."""
        for scaler in self.managed.scalers:
            if is_scaled_by(scaler, self.optimizer):
                return scaler
        raise PlanError(
            "a GradScaler steps the optimizer, and is not attached, but an infinity on one worker "
            "must lower its scale on all workers; call fleet.attach(scaler=scaler) after making it"
        )

    def _unscale(self) -> bool:
        """Undo a scaler's scale, unless it was undone; returns True when it found an infinity."""
        found = getattr(self.optimizer, "found_inf", None)
        scale = getattr(self.optimizer, "grad_scale", None)
        self._scaling = None
        if found is None:
            return False
        self._scaling = self._attached_scaler()
        if scale is not None:
            grads = [p.grad for p in self._parameters() if p.grad is not None]
            foreach_unscale_(grads, found, 1.0 / scale)
        dense_group = self._open_session().dense_group
        if dense_group is not None:
            # all workers must drop the steps of dense parameters as well
            dense_group.all_reduce(found, "max")
        # so torch's own step ignores the scaler, which deletes both afterwards
        self.optimizer.found_inf = self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        return bool(found.item())


def _closure_called(args: Any, kwargs: Any) -> Any:
    """Call a closure now: torch's own step would call it too late."""
    closure = closure_in(args, kwargs)
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return with_closure(args, kwargs, lambda: loss)


def served_programs() -> ServedPrograms:
    """The module of programs, imported late, since most scripts write none."""
    from fleetlight.fleet.served import programs

    return programs
