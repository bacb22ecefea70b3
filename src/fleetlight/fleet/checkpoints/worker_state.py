# SPDX-License-Identifier: Apache-2.0
"""What a worker consists of beside its model and its optimizers' tensors: `PARTS`.

Checkpoints, the resumption of a job and the replay of a killed worker all iterate over it. A new
part is one class with the methods of `Stateful`, and its place in `PARTS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fleetlight.fleet.context import Context
from fleetlight.fleet.job import Purpose, SavedPart, Stateful
from fleetlight.fleet.served.shard_queue import positions
from fleetlight.fleet.training import compression, local_training
from fleetlight.fleet.training.registered import names_of, registered_model
from fleetlight.observe.log import logger

if TYPE_CHECKING:
    from fleetlight.fleet.served.steps import ServedSteps


@dataclasses.dataclass
class Loaders:
    """Positions of the sharded loaders in a checkpoint: those of the whole job."""

    context: Context
    name: ClassVar[str] = "loaders"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By loader, in the order in which they were made."""
        return positions(self.context)

    def load(self, saved: SavedPart) -> None:
        """Give every loader its position, or change none."""
        loaders, found = self.context.loaders, saved.first or []
        if saved.purpose is Purpose.RESUME:
            return  # each loader takes its position when it is made
        if len(found) != len(loaders):
            logger.warning(
                "the checkpoint knows the positions of %d loaders, this job has %d sharded so far: "
                "positions are not restored; call fleet.shard before load_persistables",
                len(found),
                len(loaders),
            )
            return
        before = [loader.state_dict() for loader in loaders]
        try:
            for loader, position in zip(loaders, found, strict=True):
                loader.load_state_dict(position)
        except Exception:
            for loader, position in zip(loaders, before, strict=True):
                loader.load_state_dict(position)
            raise


@dataclasses.dataclass
class StandingLoaders:
    """Where a worker stands in its loaders at a step."""

    context: Context
    name: ClassVar[str] = "loaders"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """By loader."""
        return [loader.standing() for loader in self.context.loaders]

    def load(self, saved: SavedPart) -> None:
        """Put the others where they stood; one that is being read is there already."""
        for loader, position in zip(self.context.loaders, saved.own, strict=False):
            if not loader.is_being_read:
                loader.go_on(position, must_be_asked=False)


@dataclasses.dataclass
class LossScalers:
    """The loss scale of each optimizer."""

    context: Context
    name: ClassVar[str] = "scalers"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """By optimizer; None for one without."""
        return [plan.scaler_state() for plan in self.context.optimizers]

    def load(self, saved: SavedPart) -> None:
        """It is the same on all workers."""
        for plan, scaler in zip(self.context.optimizers, saved.first or [], strict=False):
            plan.load_scaler_state(scaler)


@dataclasses.dataclass
class StepCounts:
    """How many steps each optimizer has made on the servers: bias corrections count them."""

    context: Context
    name: ClassVar[str] = "steps"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """By optimizer."""
        return [plan.steps for plan in served(self.context)]

    def load(self, saved: SavedPart) -> None:
        """Workers whose data ended early have made fewer: the most steps count."""
        counts = [max(steps) for steps in zip(*(one or [] for one in saved.each), strict=False)]
        for number, plan in enumerate(served(self.context)):
            plan.steps = counts[number] if number < len(counts) else saved.step


@dataclasses.dataclass
class ParamGroups:
    """What the param groups say, such as the learning rate, of a worker that is replayed."""

    context: Context
    name: ClassVar[str] = "settings"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """By optimizer and group."""
        return [
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in plan.optimizer.param_groups
            ]
            for plan in served(self.context)
        ]

    def load(self, saved: SavedPart) -> None:
        """Put them into the groups."""
        for plan, settings in zip(served(self.context), saved.own, strict=True):
            for group, kept in zip(plan.optimizer.param_groups, settings, strict=True):
                group.update(kept)


@dataclasses.dataclass
class LearningRates:
    """The learning-rate schedulers of the script, of a job that resumes or is replayed."""

    context: Context
    name: ClassVar[str] = "schedulers"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """In the order in which they were made."""
        schedulers = self.context.schedulers
        return None if schedulers is None else schedulers.states(self._optimizers())

    def load(self, saved: SavedPart) -> None:
        """The script must have made the same ones."""
        if self.context.schedulers is not None:
            self.context.schedulers.load(saved.first or [], self._optimizers())

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [plan.optimizer for plan in self.context.optimizers]


@dataclasses.dataclass
class LocalTraining:
    """What LocalSGD and DiLoCo keep between two averages; the same on all workers."""

    context: Context
    name: ClassVar[str] = "averaging"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By optimizer, on worker 0: as large as the model."""
        if self.context.group.index:
            return None
        return local_training.saved_states(self.context, names_of(registered_model(self.context)))

    def load(self, saved: SavedPart) -> None:
        """Behind the values of the model: what trains alone goes on from there."""
        names = names_of(registered_model(self.context))
        local_training.load(self.context, saved.first or [], saved.step, names)


@dataclasses.dataclass
class Unsent:
    """What a worker keeps of gradients that were not sent as they are."""

    context: Context
    name: ClassVar[str] = "compression"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By number of the model and name of the parameter."""
        return compression.unsent(self.context) or None

    def load(self, saved: SavedPart) -> None:
        """It is each worker's own, so the number of workers must be the same."""
        compression.load_unsent(self.context, saved.own or {}, len(saved.each))


@dataclasses.dataclass
class JobStep:
    """The steps of the job; a checkpoint has them in its manifest."""

    context: Context
    name: ClassVar[str] = "step"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """A number."""
        return self.context.step

    def load(self, saved: SavedPart) -> None:
        """Count from there."""
        self.context.step = saved.own


@dataclasses.dataclass
class Saves:
    """How many saves the job has made by itself, and at which step the last one."""

    context: Context
    name: ClassVar[str] = "saves"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """None where the job has no folder."""
        return None if self.context.stopping is None else self.context.stopping.saves

    def load(self, saved: SavedPart) -> None:
        """Count from there."""
        if self.context.stopping is not None and saved.own is not None:
            self.context.stopping.saves = saved.own


@dataclasses.dataclass
class StoppedBetween:
    """Between two batches of which loader the job was when it saved; its resumption asks."""

    context: Context
    name: ClassVar[str] = "between"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME,)

    def save(self) -> Any:
        """The number of the loader."""
        return None if self.context.stopping is None else self.context.stopping.place_now

    def load(self, saved: SavedPart) -> None:
        """Random numbers are put in place there, which `Resumption` does."""


#: in the order in which they are loaded; positions first, since they may refuse
PARTS: tuple[Callable[[Context], Stateful], ...] = (
    Loaders,
    StandingLoaders,
    LossScalers,
    StepCounts,
    ParamGroups,
    LearningRates,
    JobStep,
    Saves,
    StoppedBetween,
    LocalTraining,
    Unsent,
)


def parts(context: Context, *purposes: Purpose) -> list[Stateful]:
    """What is kept of a worker for one of these purposes."""
    made = [part(context) for part in PARTS]
    return [part for part in made if set(purposes) & set(part.purposes)]


def saved_values(context: Context, *purposes: Purpose) -> dict[str, Any]:
    """The values of a worker's record."""
    found = {part.name: part.save() for part in parts(context, *purposes)}
    return {name: value for name, value in found.items() if value is not None}


def served(context: Context) -> list[ServedSteps]:
    """Those of the optimizers whose steps the servers take part in."""
    from fleetlight.fleet.served.steps import ServedSteps

    policies = [plan.policy for plan in context.optimizers]
    return [policy for policy in policies if isinstance(policy, ServedSteps)]
