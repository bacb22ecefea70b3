# SPDX-License-Identifier: Apache-2.0
"""What a worker consists of beside its model and its optimizers' tensors: `PARTS`.

Checkpoints, the resumption of a job and the replay of a killed worker all iterate over it. A new
part is one class with the methods of `Stateful`, and its place in `PARTS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import WorkerState
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import Purpose, SavedPart, Stateful
from fleetlight.fleet.training import compression, local_training
from fleetlight.fleet.training.registering import names_of, registered_model
from fleetlight.observe.log import logger


@dataclasses.dataclass
class Loaders:
    """Positions of the sharded loaders in a checkpoint: those of the whole job."""

    job: Job
    name: ClassVar[str] = "loaders"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By loader, in the order in which they were made."""
        return positions(self.job)

    def load(self, saved: SavedPart) -> None:
        """Give every loader its position, or change none."""
        loaders, found = self.job.loaders, saved.first or []
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

    job: Job
    name: ClassVar[str] = "loaders"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """By loader."""
        return [loader.cursor.resume_state() for loader in self.job.loaders]

    def load(self, saved: SavedPart) -> None:
        """Put the others where they stood; one that is being read is there already."""
        for loader, position in zip(self.job.loaders, saved.own, strict=False):
            if not loader.cursor.is_being_read:
                loader.cursor.resume(position, must_be_asked=False)


@dataclasses.dataclass
class LossScalers:
    """The loss scale of each optimizer."""

    job: Job
    name: ClassVar[str] = "scalers"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """By optimizer; None for one without."""
        return [plan.scaler_state() for plan in self.job.optimizers]

    def load(self, saved: SavedPart) -> None:
        """It is the same on all workers."""
        for plan, scaler in zip(self.job.optimizers, saved.first or [], strict=False):
            plan.load_scaler_state(scaler)


@dataclasses.dataclass
class StepCounts:
    """How many steps each optimizer has made on the servers: bias corrections count them."""

    job: Job
    name: ClassVar[str] = "steps"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """By optimizer."""
        return [plan.steps_on_servers for plan in self.job.served_steps()]

    def load(self, saved: SavedPart) -> None:
        """Workers whose data ended early have made fewer: the most steps count."""
        counts = [max(steps) for steps in zip(*(one or [] for one in saved.each), strict=False)]
        for number, plan in enumerate(self.job.served_steps()):
            plan.count_on_servers(counts[number] if number < len(counts) else saved.step)


@dataclasses.dataclass
class ParamGroups:
    """What the param groups say, such as the learning rate, of a worker that is replayed."""

    job: Job
    name: ClassVar[str] = "settings"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """By optimizer and group."""
        return [
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in plan.optimizer.param_groups
            ]
            for plan in self.job.served_steps()
        ]

    def load(self, saved: SavedPart) -> None:
        """Put them into the groups."""
        for plan, settings in zip(self.job.served_steps(), saved.own, strict=True):
            for group, kept in zip(plan.optimizer.param_groups, settings, strict=True):
                group.update(kept)


@dataclasses.dataclass
class LearningRates:
    """The attached learning-rate schedulers, of a job that resumes or is replayed."""

    job: Job
    name: ClassVar[str] = "schedulers"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """In the order in which they were attached."""
        optimizers = self._optimizers()
        self.job.schedulers.warn_of_others(optimizers)
        return self.job.schedulers.states(optimizers)

    def load(self, saved: SavedPart) -> None:
        """The script must have attached the same ones."""
        self.job.schedulers.load(saved.first or [], self._optimizers())

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [plan.optimizer for plan in self.job.optimizers]


@dataclasses.dataclass
class AttachedScalers:
    """The attached loss scalers, of a job that resumes or is replayed."""

    job: Job
    name: ClassVar[str] = "attached_scalers"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """In the order in which they were attached."""
        return [scaler.state_dict() for scaler in self.job.scalers] or None

    def load(self, saved: SavedPart) -> None:
        """They are the same on all workers."""
        for scaler, state in zip(self.job.scalers, saved.first or [], strict=False):
            if state:
                scaler.load_state_dict(state)


@dataclasses.dataclass
class LocalTrainingState:
    """What LocalSGD and DiLoCo keep between two averages; the same on all workers."""

    job: Job
    name: ClassVar[str] = "averaging"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By optimizer, on worker 0: as large as the model."""
        if self.job.group.index:
            return None
        return local_training.saved_states(self.job, names_of(registered_model(self.job)))

    def load(self, saved: SavedPart) -> None:
        """Behind the values of the model: what trains alone goes on from there."""
        names = names_of(registered_model(self.job))
        local_training.load(self.job, saved.first or [], saved.step, names)


@dataclasses.dataclass
class Unsent:
    """What a worker keeps of gradients that were not sent as they are."""

    job: Job
    name: ClassVar[str] = "compression"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By number of the model and name of the parameter."""
        return compression.unsent(self.job) or None

    def load(self, saved: SavedPart) -> None:
        """It is each worker's own, so the number of workers must be the same."""
        compression.load_unsent(self.job, saved.own or {}, len(saved.each))


@dataclasses.dataclass
class JobStep:
    """The steps of the job; a checkpoint has them in its manifest."""

    job: Job
    name: ClassVar[str] = "step"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """A number."""
        return self.job.step

    def load(self, saved: SavedPart) -> None:
        """Count from there."""
        self.job.step = saved.own


@dataclasses.dataclass
class Saves:
    """How many saves the job has made by itself, and at which step the last one."""

    job: Job
    name: ClassVar[str] = "saves"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """None where the job has no folder."""
        return None if self.job.stopping is None else self.job.stopping.saves

    def load(self, saved: SavedPart) -> None:
        """Count from there."""
        if self.job.stopping is not None and saved.own is not None:
            self.job.stopping.saves = saved.own


@dataclasses.dataclass
class StoppedBetween:
    """Between two batches of which loader the job was when it saved; its resumption asks."""

    job: Job
    name: ClassVar[str] = "between"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME,)

    def save(self) -> Any:
        """The number of the loader."""
        return None if self.job.stopping is None else self.job.stopping.place_now

    def load(self, saved: SavedPart) -> None:
        """Random numbers are put in place there, which `Resumption` does."""


#: in the order in which they are loaded; positions first, since they may refuse
PARTS: tuple[Callable[[Job], Stateful], ...] = (
    Loaders,
    StandingLoaders,
    LossScalers,
    StepCounts,
    ParamGroups,
    LearningRates,
    AttachedScalers,
    JobStep,
    Saves,
    StoppedBetween,
    LocalTrainingState,
    Unsent,
)


def parts(job: Job, *purposes: Purpose) -> list[Stateful]:
    """What is kept of a worker for one of these purposes."""
    made = [part(job) for part in PARTS]
    return [part for part in made if set(purposes) & set(part.purposes)]


def saved_values(job: Job, *purposes: Purpose) -> dict[str, Any]:
    """The values of a worker's record."""
    found = {part.name: part.save() for part in parts(job, *purposes)}
    return {name: value for name, value in found.items() if value is not None}


def worker_record(job: Job) -> WorkerState:
    """What a checkpoint keeps of this worker."""
    also = () if job.stopping is None else (Purpose.RESUME,)
    return WorkerState(
        rank=job.group.index,
        rng=checkpoint.rng_state(),
        values=saved_values(job, Purpose.CHECKPOINT, *also),
    )


def positions(job: Job) -> list[dict[str, Any]]:
    """Of the loaders, for a checkpoint: those that worker 0 knows are those of all workers."""
    if job.group.index == 0 and not job.replay.is_catching_up:
        return [loader.cursor.shared_state() for loader in job.loaders]
    return [loader.state_dict() for loader in job.loaders]


def tell_positions(job: Job) -> None:
    """Tell server 0 which records this worker has done; all its steps are with the servers."""
    if not job.replay.is_catching_up:
        for loader in job.loaders:
            loader.source.report()
