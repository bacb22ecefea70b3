# SPDX-License-Identifier: Apache-2.0
"""Workers that train alone: LocalSGD, adaptive LocalSGD and DiLoCo, as the strategy says."""

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


class AloneOrTogether(Protocol):
    """Steps that a worker may make alone for a while; `collective.steps.ReducedSteps`."""

    job: Job
    optimizer: torch.optim.Optimizer
    #: the models that it steps, known at its first step
    models: list[RegisteredModel]

    @property
    def by_program(self) -> bool:
        """True when a program makes the steps."""

    def trains_some_of(self, model: RegisteredModel) -> bool:
        """Whether it steps a parameter of the model."""

    def meet_early(self) -> None:
        """Let workers that train alone be equal now."""


class LocalTraining:
    """What a registered optimizer does where its steps are made alone, and when the workers meet.

    Between two meetings workers differ: before something is computed that should be the same on
    all, such as an evaluation, `fleet.barrier_worker()` lets them meet.
    """

    def __init__(self, steps: AloneOrTogether, mode: str, engine: LocalTrainingEngine) -> None:
        self.engine = engine
        self.steps, self._mode = steps, mode
        #: how many losses had been seen at the last meeting
        self._seen = 0
        self._is_told = False

    @property
    def now(self) -> bool:
        """True when the coming step is made alone."""
        return self.engine.alone

    @property
    def wants_loss(self) -> bool:
        """True when the schedule will ask for the loss of the coming step."""
        return self.engine.wants_loss

    def before_step(self) -> None:
        """Called before each step, when it is known what the optimizer trains."""
        scaler = scaler_at_work() if self.now else None
        if scaler is not None and scaler.is_enabled():
            raise PlanError(
                f"{self._mode}: a GradScaler steps the optimizer, and would leave out steps on one "
                "worker and not on another; leave it out, and compute in bfloat16, which needs "
                "none: torch.autocast(..., torch.bfloat16), or strategy.amp"
            )
        if self.now and not self._is_told:
            self._tell()
        self.engine.in_place = self.steps.by_program
        self.engine.before_step()

    def step_made(self) -> bool:
        """Called behind each step; answers whether the workers have met."""
        seen = self.steps.job.loss_probe
        new = seen is not None and seen.number > self._seen
        schedule = self.engine.schedule
        # what is called in parts only comes here unseen before its first step
        late = isinstance(schedule, AdaptiveInterval) and schedule.meets_next and schedule.step > 0
        if late and not new:
            raise PlanError(
                f"{self._mode}: no loss was seen since the workers met last, and how often they "
                "meet depends on it; call loss.backward() or optimizer.minimize(loss) with the "
                "loss as one number"
            )
        members = self._members() if self.engine.meets_next else []
        k = schedule.k
        met = self.engine.step_made(members, seen.value if seen and new else None)
        if schedule.k != k and self.steps.job.group.index == 0:
            logger.info("%s: the workers meet every %d steps now", self._mode, schedule.k)
        if met and seen is not None:
            self._seen = seen.number
        return met

    def trains_some_of(self, model: RegisteredModel) -> bool:
        """As in `LocalSteps`."""
        return self.steps.trains_some_of(model)

    def meet(self) -> None:
        """As in `LocalSteps`."""
        self.steps.meet_early()

    def meet_early(self) -> bool:
        """Let the workers be equal; returns whether they had to meet for it."""
        return self.engine.meet_early(self._members())

    def settle(self) -> None:
        """Let the states of their optimizers be equal, too."""
        self.engine.settle(self._members())

    def tell_at_end(self) -> None:
        """Say so if the workers never trained alone, or still differ."""
        schedule = self.engine.schedule
        if schedule.apart:
            logger.warning(
                "%s: the job ended %s, so each worker has parameters of its own; let all call "
                "fleet.barrier_worker() behind the last step, before saving or evaluating",
                self._mode,
                self.how_far_apart(),
            )
        elif 0 < schedule.step <= schedule.begin_step:
            logger.warning(
                "%s: the job ended after step %d, and up to begin_step = %d workers train "
                "synchronously, so they never trained alone",
                self._mode,
                schedule.step,
                schedule.begin_step,
            )

    def how_far_apart(self) -> str:
        """Since when each worker has trained for itself."""
        schedule = self.engine.schedule
        steps = schedule.step - schedule.last
        return f"{steps} {'step' if steps == 1 else 'steps'} behind the last meeting"

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

    def _tell(self) -> None:
        self._is_told = True
        if self.steps.job.group.index == 0:
            schedule = self.engine.schedule
            logger.info(
                "%s: from step %d on workers train alone, and meet every %d steps%s",
                self._mode,
                schedule.step + 1,
                schedule.k,
                " at first" if isinstance(schedule, AdaptiveInterval) else "",
            )


def alone_of(steps: AloneOrTogether) -> LocalTraining | None:
    """How an optimizer steps alone, if the strategy says that it does and there are others."""
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
    """The setting by which workers train alone. To average at each step is to train together."""
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


def trains_alone(job: Job, model: RegisteredModel) -> bool:
    """True while all optimizers that step the model make steps of their own."""
    mine = [alone for alone in _all_of(job) if alone.trains_some_of(model)]
    return bool(mine) and all(alone.now for alone in mine)


def _all_of(job: Job) -> list[LocalSteps]:
    return [plan.alone for plan in job.optimizers if plan.alone is not None]


def meet(job: Job, operation: str) -> None:
    """Let all workers be equal now. All of them come here."""
    everybody = _all_of(job)
    if not everybody:
        return
    _check_equally_far(everybody, job, operation)
    for alone in everybody:
        alone.meet()


def settle(job: Job, operation: str) -> None:
    """The same, and the states of optimizers: what one worker saves is then what all have."""
    meet(job, operation)
    for alone in _all_of(job):
        alone.settle()


def _check_equally_far(mine_alone: Sequence[LocalSteps], job: Job, operation: str) -> None:
    """Who has nothing to meet for would not be there when the others wait for it."""
    mine = [alone.engine.schedule.step for alone in mine_alone]
    everybody = job.group.gather_bytes(msgspec.json.encode(mine), operation)
    for index, one in enumerate(everybody):
        steps = msgspec.json.decode(one, type=list[int])
        if one != everybody[0]:
            first = msgspec.json.decode(everybody[0], type=list[int])
            raise DivergedError(
                f"{operation}: the workers have made different numbers of steps: {_counted(first)} "
                f"on worker 0, but {_counted(steps)} on worker {index}; workers that train alone "
                "meet in this call, so all must make it behind the same step"
            )


def _counted(steps: Sequence[int]) -> str:
    return " and ".join(map(str, steps))


def tell_at_end(job: Job) -> None:
    """What is to be said of it when a job ends well."""
    for alone in _all_of(job) if job.group.index == 0 else ():
        alone.tell_at_end()


def warn_if_apart(job: Job, operation: str) -> None:
    """Of something that is made of this worker's parameters alone."""
    for alone in _all_of(job):
        if alone.engine.schedule.apart:
            logger.warning(
                "%s: it takes the parameters of this worker, which stand %s; let all workers "
                "call fleet.barrier_worker() before",
                operation,
                alone.how_far_apart(),
            )


def close(job: Job) -> None:
    """Losses are seen no longer."""
    if job.loss_probe is not None:
        job.loss_probe.close()
        job.loss_probe = None


# -- checkpoints


def saved_states(job: Job, names: Names) -> list[Any] | None:
    """What worker 0 keeps of each optimizer; it is the same on all workers."""
    alone = [plan.alone for plan in job.optimizers]
    states = [one and one.engine.state(names) for one in alone]
    return states if any(states) else None


def load(job: Job, states: Sequence[Any], step: int, names: Names) -> None:
    """Let optimizers continue where those of a checkpoint at a step of the job stood."""
    for number, plan in enumerate(job.optimizers):
        state = states[number] if number < len(states) else None
        if state is not None:
            plan.go_on(functools.partial(_load, state=state, names=names))
        else:
            # how they shared the steps of the job is not known
            own = step // len(job.optimizers)
            plan.go_on(functools.partial(_begin_anew, step=own, names=names))


def begin_anew(job: Job, names: Names) -> None:
    """Other values were given to all workers: those that train alone go on from them."""
    for alone in _all_of(job):
        alone.engine.restart_at(alone.engine.schedule.step, names)


def _load(engine: LocalTrainingEngine, *, state: Mapping[str, Any], names: Names) -> None:
    engine.load(state, names)


def _begin_anew(engine: LocalTrainingEngine, *, step: int, names: Names) -> None:
    engine.restart_at(step, names)


def may_train_alone(job: Job) -> bool:
    """Whether the strategy has workers train alone, if only later."""
    return any(getattr(job.strategy, name) for name in LOCAL_TRAINING)
