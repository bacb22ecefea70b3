# SPDX-License-Identifier: Apache-2.0
"""Local training: LocalSGD, adaptive LocalSGD and DiLoCo, according to the strategy."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import torch
from torch import nn

from fleetlight.collective.local_training.engine import LocalTrainingEngine
from fleetlight.collective.local_training.outer import (
    Member,
    NesterovMomentum,
    OuterOptimizer,
    PlainMean,
)
from fleetlight.collective.local_training.schedule import AdaptiveInterval, FixedInterval
from fleetlight.errors import DivergedError, PlanError
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.loss import LossProbe, scaler_at_work
from fleetlight.fleet.protocols import LocalSteps, RegisteredModel
from fleetlight.observe.log import logger
from fleetlight.strategy import LOCAL_TRAINING, AveragingConfigs, DistributedStrategy

Names: TypeAlias = Mapping[nn.Parameter, str]


class LocalStepper(Protocol):
    """Steps that a worker may make alone for a while; see `collective.steps.ReducedSteps`."""

    job: Job
    optimizer: torch.optim.Optimizer
    #: the models that it steps; set at its first step
    models: list[RegisteredModel]

    @property
    def by_program(self) -> bool:
        """True when a program makes the steps."""

    def steps_some_of(self, model: RegisteredModel) -> bool:
        """True when it steps a parameter of the model."""

    def average_early(self) -> None:
        """Average the parameters of the workers now."""


class LocalTraining:
    """The local steps of a registered optimizer, and the averages between them.

    Between two averages the parameters of the workers differ. A script calls
    `fleet.barrier_worker()` before it computes what must be equal on all, such as an evaluation.
    """

    def __init__(self, steps: LocalStepper, mode: str, engine: LocalTrainingEngine) -> None:
        self.engine = engine
        self.steps, self._mode = steps, mode
        #: the number of losses seen at the last average
        self._seen = 0
        self._is_reported = False

    @property
    def next_is_local(self) -> bool:
        """True when the worker makes the next step alone."""
        return self.engine.next_is_local

    @property
    def wants_loss(self) -> bool:
        """True when the schedule needs the loss of the next step."""
        return self.engine.wants_loss

    def before_step(self) -> None:
        """Prepare a step; the optimizer's parameters are known by now."""
        scaler = scaler_at_work() if self.next_is_local else None
        if scaler is not None and scaler.is_enabled():
            raise PlanError(
                f"{self._mode}: a GradScaler steps the optimizer, and would skip steps on one "
                "worker and not on another; leave it out, and compute in bfloat16, which needs "
                "none: torch.autocast(..., torch.bfloat16), or strategy.amp"
            )
        if self.next_is_local and not self._is_reported:
            self._report_start()
        self.engine.in_place = self.steps.by_program
        self.engine.before_step()

    def step_made(self) -> bool:
        """Count a step, and average where it is due; returns whether the workers have averaged."""
        seen = self.steps.job.loss_probe
        new = seen is not None and seen.number > self._seen
        schedule = self.engine.schedule
        # a model that is called in parts has no loss before its first step
        late = (
            isinstance(schedule, AdaptiveInterval) and schedule.averages_next and schedule.step > 0
        )
        if late and not new:
            raise PlanError(
                f"{self._mode}: no loss was recorded since the last average, and the number of "
                "local steps depends on it; call loss.backward() or optimizer.minimize(loss) with "
                "the loss as one number"
            )
        members = self._members() if self.engine.averages_next else []
        k = schedule.k
        averaged = self.engine.step_made(members, seen.value if seen and new else None)
        if schedule.k != k and self.steps.job.group.index == 0:
            logger.info("%s: the workers average every %d steps now", self._mode, schedule.k)
        if averaged and seen is not None:
            self._seen = seen.number
        return averaged

    def steps_some_of(self, model: RegisteredModel) -> bool:
        return self.steps.steps_some_of(model)

    def average(self) -> None:
        self.steps.average_early()

    def average_early(self) -> bool:
        """Average the parameters now; returns False where they are equal already."""
        return self.engine.average_early(self._members())

    def average_with_states(self) -> None:
        """Average the states of the optimizers, too."""
        self.engine.settle(self._members())

    def warn_at_end(self) -> None:
        """Warn if the workers never trained alone, or still differ."""
        schedule = self.engine.schedule
        if schedule.differs:
            logger.warning(
                "%s: the job ended %s, so each worker has parameters of its own; let all workers "
                "call fleet.barrier_worker() after the last step, before saving or evaluating",
                self._mode,
                self.describe_drift(),
            )
        elif 0 < schedule.step <= schedule.begin_step:
            logger.warning(
                "%s: the job ended after step %d, and up to begin_step = %d workers train "
                "synchronously, so they never trained alone",
                self._mode,
                schedule.step,
                schedule.begin_step,
            )

    def describe_drift(self) -> str:
        """The number of steps since the last average."""
        schedule = self.engine.schedule
        steps = schedule.step - schedule.last
        return f"{steps} {'step' if steps == 1 else 'steps'} after the last average"

    def _members(self) -> list[Member]:
        return [
            Member(
                model.means,
                dict(model.module.named_parameters()),
                dict(model.module.named_buffers()),
            )
            for model in self.steps.models
            if model.means is not None
        ]

    def _report_start(self) -> None:
        self._is_reported = True
        if self.steps.job.group.index == 0:
            schedule = self.engine.schedule
            logger.info(
                "%s: from step %d on workers train alone, and average every %d steps%s",
                self._mode,
                schedule.step + 1,
                schedule.k,
                " at first" if isinstance(schedule, AdaptiveInterval) else "",
            )


def local_training_of(steps: LocalStepper) -> LocalTraining | None:
    """The local training of an optimizer, if the strategy asks for it and there are others."""
    job = steps.job
    group = job.dense_group
    if group is None or group.alone:
        return None
    found = chosen(job.strategy)
    if found is None:
        return None
    mode, configs, schedule, outer = found
    if isinstance(schedule, AdaptiveInterval) and job.loss_probe is None:
        job.loss_probe = LossProbe()
    engine = LocalTrainingEngine(
        steps.optimizer,
        group,
        schedule=schedule,
        outer=outer,
        optimizer_state=configs.optimizer_state,
        buffers=configs.buffers,
    )
    return LocalTraining(steps, mode, engine)


def chosen(
    strategy: DistributedStrategy,
) -> tuple[str, AveragingConfigs, FixedInterval, OuterOptimizer] | None:
    """The setting of local training; an average at each step is none."""
    local, adaptive, diloco = (
        strategy.localsgd_configs,
        strategy.adaptive_localsgd_configs,
        strategy.diloco_configs,
    )
    if strategy.localsgd and local.k_steps > 1:
        return "localsgd", local, FixedInterval(local.k_steps, local.begin_step), PlainMean()
    if strategy.adaptive_localsgd and adaptive.max_k_steps > 1:
        k, max_k = adaptive.init_k_steps, adaptive.max_k_steps
        return (
            "adaptive_localsgd",
            adaptive,
            AdaptiveInterval(k, max_k, adaptive.begin_step),
            PlainMean(),
        )
    if strategy.diloco:
        outer = NesterovMomentum(diloco.outer_lr, diloco.outer_momentum)
        return "diloco", diloco, FixedInterval(diloco.k_steps, diloco.begin_step), outer
    return None


def trains_locally(job: Job, model: RegisteredModel) -> bool:
    """True while all optimizers that step the model make local steps."""
    mine = [local for local in _all_of(job) if local.steps_some_of(model)]
    return bool(mine) and all(local.next_is_local for local in mine)


def _all_of(job: Job) -> list[LocalSteps]:
    return [one.local_steps for one in job.optimizers if one.local_steps is not None]


def average(job: Job, operation: str) -> None:
    """Average all parameters now; every worker calls it."""
    found = _all_of(job)
    if not found:
        return
    _check_same_steps(found, job, operation)
    for local in found:
        local.average()


def average_with_states(job: Job, operation: str) -> None:
    """Average parameters and states of optimizers: worker 0 then saves what all workers have."""
    average(job, operation)
    for local in _all_of(job):
        local.average_with_states()


def _check_same_steps(local: Sequence[LocalSteps], job: Job, operation: str) -> None:
    """A worker that has nothing to average would keep the others waiting."""
    mine = [one.engine.schedule.step for one in local]
    gathered = job.group.gather_bytes(msgspec.json.encode(mine), operation)
    for index, one in enumerate(gathered):
        steps = msgspec.json.decode(one, type=list[int])
        if one != gathered[0]:
            first = msgspec.json.decode(gathered[0], type=list[int])
            raise DivergedError(
                f"{operation}: the workers have made different numbers of steps: {_counted(first)} "
                f"on worker 0, but {_counted(steps)} on worker {index}; workers that train alone "
                "average in this call, so all must call it after the same step"
            )


def _counted(steps: Sequence[int]) -> str:
    return " and ".join(map(str, steps))


def warn_at_end(job: Job) -> None:
    """Warn on worker 0 when a job ends well."""
    for local in _all_of(job) if job.group.index == 0 else ():
        local.warn_at_end()


def warn_if_apart(job: Job, operation: str) -> None:
    """Warn of an operation that uses the parameters of this worker alone."""
    for local in _all_of(job):
        if local.engine.schedule.differs:
            logger.warning(
                "%s: it takes the parameters of this worker, %s; let all workers call "
                "fleet.barrier_worker() first",
                operation,
                local.describe_drift(),
            )


def close(job: Job) -> None:
    """Stop watching losses."""
    if job.loss_probe is not None:
        job.loss_probe.close()
        job.loss_probe = None


# -- checkpoints


def saved_states(job: Job, names: Names) -> list[Any] | None:
    """The state of each optimizer's local training; equal on all workers."""
    local = [one.local_steps for one in job.optimizers]
    states = [one and one.engine.state(names) for one in local]
    return states if any(states) else None


def load(job: Job, states: Sequence[Any], step: int, names: Names) -> None:
    """Let optimizers continue from the states of a checkpoint at a step of the job."""
    for number, optimizer in enumerate(job.optimizers):
        state = states[number] if number < len(states) else None
        if state is not None:
            optimizer.resume_local(functools.partial(_load, state=state, names=names))
        else:
            # the checkpoint does not say how the optimizers shared the steps of the job
            own = step // len(job.optimizers)
            optimizer.resume_local(functools.partial(_restart, step=own, names=names))


def restart(job: Job, names: Names) -> None:
    """Let local training continue from other values, which all workers have."""
    for local in _all_of(job):
        local.engine.restart_at(local.engine.schedule.step, names)


def _load(engine: LocalTrainingEngine, *, state: Mapping[str, Any], names: Names) -> None:
    engine.load(state, names)


def _restart(engine: LocalTrainingEngine, *, step: int, names: Names) -> None:
    engine.restart_at(step, names)


def may_train_locally(job: Job) -> bool:
    """True when the strategy asks for local training, now or later."""
    return any(getattr(job.strategy, name) for name in LOCAL_TRAINING)
