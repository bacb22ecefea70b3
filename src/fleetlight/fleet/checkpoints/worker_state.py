# SPDX-License-Identifier: Apache-2.0
"""`PARTS`: the state of a worker beside its model and the tensors of its optimizers.

Checkpoints, the resumption of a job and the replay of a killed worker all iterate over it. A new
part is one class with the methods of `Stateful`, and its place in `PARTS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import Purpose, SavedPart, Stateful
from fleetlight.fleet.training import compression, local_training
from fleetlight.fleet.training.registering import names_of, registered_model
from fleetlight.observe.log import logger

if TYPE_CHECKING:
    from fleetlight.checkpoint import WorkerState


@dataclasses.dataclass
class SharedPositions:
    """Positions of the sharded loaders in a checkpoint, which all workers share."""

    job: Job
    name: ClassVar[str] = "loaders"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By loader, in the order of the script."""
        return positions(self.job)

    def load(self, saved: SavedPart) -> None:
        """Set the position of every loader, or change none."""
        loaders, found = self.job.loaders, positions_of_all(saved.each)
        if saved.purpose is Purpose.RESUME:
            return  # each loader gets its position when the script makes it
        if len(found) != len(loaders):
            logger.warning(
                "the checkpoint has the positions of %d loaders, and this job has %d sharded so "
                "far: positions are not restored; call fleet.shard before load_persistables",
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
class WorkerPositions:
    """Positions of one worker in its loaders at a step."""

    job: Job
    name: ClassVar[str] = "loaders"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """By loader, in the order of the script."""
        return [loader.cursor.resume_state() for loader in self.job.loaders]

    def load(self, saved: SavedPart) -> None:
        """Set the positions of loaders that are not being read; the others have theirs."""
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
        return [managed.scaler_state() for managed in self.job.optimizers]

    def load(self, saved: SavedPart) -> None:
        """Load the scale of worker 0: it is equal on all workers."""
        for managed, scaler in zip(self.job.optimizers, saved.first or [], strict=False):
            managed.load_scaler_state(scaler)


@dataclasses.dataclass
class StepCounts:
    """The number of steps of each optimizer on the servers, for bias corrections."""

    job: Job
    name: ClassVar[str] = "steps"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """By optimizer."""
        return [managed.steps_on_servers for managed in self.job.served_optimizers()]

    def load(self, saved: SavedPart) -> None:
        """Take the largest number: workers whose data ended early have made fewer steps."""
        counts = [max(steps) for steps in zip(*(one or [] for one in saved.each), strict=False)]
        for number, managed in enumerate(self.job.served_optimizers()):
            managed.count_on_servers(counts[number] if number < len(counts) else saved.step)


@dataclasses.dataclass
class ParamGroups:
    """Settings of the param groups, such as the learning rate, for a replay."""

    job: Job
    name: ClassVar[str] = "settings"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """By optimizer and group."""
        return [
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in managed.optimizer.param_groups
            ]
            for managed in self.job.served_optimizers()
        ]

    def load(self, saved: SavedPart) -> None:
        """Set them in the groups."""
        for managed, settings in zip(self.job.served_optimizers(), saved.own, strict=True):
            for group, kept in zip(managed.optimizer.param_groups, settings, strict=True):
                group.update(kept)


@dataclasses.dataclass
class SchedulerStates:
    """The attached learning-rate schedulers, of a job that resumes or is replayed."""

    job: Job
    name: ClassVar[str] = "schedulers"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """In the order of `fleet.attach`."""
        optimizers = self._optimizers()
        self.job.schedulers.warn_of_unattached(optimizers)
        return self.job.schedulers.states(optimizers)

    def load(self, saved: SavedPart) -> None:
        """Load them into the schedulers of the same classes and order."""
        self.job.schedulers.load(saved.first or [], self._optimizers())

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [managed.optimizer for managed in self.job.optimizers]


@dataclasses.dataclass
class AttachedScalers:
    """The attached loss scalers, of a job that resumes or is replayed."""

    job: Job
    name: ClassVar[str] = "attached_scalers"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME, Purpose.REPLAY)

    def save(self) -> Any:
        """In the order of `fleet.attach`."""
        return [scaler.state_dict() for scaler in self.job.scalers] or None

    def load(self, saved: SavedPart) -> None:
        """Load the scales of worker 0: they are equal on all workers."""
        for scaler, state in zip(self.job.scalers, saved.first or [], strict=False):
            if state:
                scaler.load_state_dict(state)


@dataclasses.dataclass
class LocalTrainingState:
    """The state of LocalSGD and DiLoCo between two averages; equal on all workers."""

    job: Job
    name: ClassVar[str] = "averaging"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By optimizer, on worker 0 only, since it is as large as the model."""
        if self.job.group.index:
            return None
        return local_training.saved_states(self.job, names_of(registered_model(self.job)))

    def load(self, saved: SavedPart) -> None:
        """Continue local training from it; the model has its values by now."""
        names = names_of(registered_model(self.job))
        local_training.load(self.job, saved.first or [], saved.step, names)


@dataclasses.dataclass
class ErrorFeedbackState:
    """The error feedback of compressed gradients."""

    job: Job
    name: ClassVar[str] = "compression"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.CHECKPOINT, Purpose.RESUME)

    def save(self) -> Any:
        """By number of the model and name of the parameter."""
        return compression.feedback_state(self.job) or None

    def load(self, saved: SavedPart) -> None:
        """Load this worker's own; a job with another number of workers drops it."""
        compression.load_feedback(self.job, saved.own or {}, len(saved.each))


@dataclasses.dataclass
class JobStep:
    """The step of the job, for a replay; a checkpoint has it in its manifest."""

    job: Job
    name: ClassVar[str] = "step"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """The number of steps."""
        return self.job.step

    def load(self, saved: SavedPart) -> None:
        """Continue the count."""
        self.job.step = saved.own


@dataclasses.dataclass
class Saves:
    """The number of saves that the job has made automatically, and the step of the last one."""

    job: Job
    name: ClassVar[str] = "saves"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.REPLAY,)

    def save(self) -> Any:
        """None where the job has no folder."""
        return None if self.job.autosave is None else self.job.autosave.saves

    def load(self, saved: SavedPart) -> None:
        """Continue the count."""
        if self.job.autosave is not None and saved.own is not None:
            self.job.autosave.saves = saved.own


@dataclasses.dataclass
class SavePosition:
    """The loader between whose batches the job saved, for `Resumption`."""

    job: Job
    name: ClassVar[str] = "between"
    purposes: ClassVar[Collection[Purpose]] = (Purpose.RESUME,)

    def save(self) -> Any:
        """The number of the loader."""
        return None if self.job.autosave is None else self.job.autosave.loader_at_save

    def load(self, saved: SavedPart) -> None:
        """`Resumption` restores random numbers at that place."""


#: in the order of loading; positions come first, since they may refuse
PARTS: tuple[Callable[[Job], Stateful], ...] = (
    SharedPositions,
    WorkerPositions,
    LossScalers,
    StepCounts,
    ParamGroups,
    SchedulerStates,
    AttachedScalers,
    JobStep,
    Saves,
    SavePosition,
    LocalTrainingState,
    ErrorFeedbackState,
)


def parts(job: Job, *purposes: Purpose) -> list[Stateful]:
    """The parts that are saved for one of these purposes."""
    made = [part(job) for part in PARTS]
    return [part for part in made if set(purposes) & set(part.purposes)]


def saved_values(job: Job, *purposes: Purpose) -> dict[str, Any]:
    """The values of a worker's record, by name of the part."""
    found = {part.name: part.save() for part in parts(job, *purposes)}
    return {name: value for name, value in found.items() if value is not None}


def load_replayed(job: Job, values: Mapping[str, Any], *, but: Collection[str] = ()) -> None:
    """Load what `saved_values` returned for a replay; `but`: the names of parts to leave."""
    for part in parts(job, Purpose.REPLAY):
        if part.name not in but:
            value = values.get(part.name)
            part.load(
                SavedPart(
                    purpose=Purpose.REPLAY,
                    step=values["step"],
                    first=value,
                    own=value,
                    each=[value],
                )
            )


def worker_record(job: Job) -> WorkerState:
    """The record of this worker in a checkpoint."""
    also = () if job.autosave is None else (Purpose.RESUME,)
    return checkpoint.WorkerState(
        rank=job.group.index,
        rng=checkpoint.rng_state(),
        values=saved_values(job, Purpose.CHECKPOINT, *also),
    )


def positions(job: Job) -> list[dict[str, Any]]:
    """The positions of the loaders for a checkpoint; worker 0 has those of all workers."""
    if job.group.index == 0 and not job.replay.is_catching_up:
        return [loader.cursor.shared_state() for loader in job.loaders]
    return [loader.state_dict() for loader in job.loaders]


def positions_of_all(each: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[dict[str, Any]]:
    """The positions of the loaders for all workers, given those of each; those of worker 0.

    A loader whose position holds for its worker alone gets those of all as "each".
    """
    first = (each[0] if each else None) or []
    return [
        {**one, "each": [own[n] if own and n < len(own) else None for own in each]}
        if "of" in one
        else {**one}
        for n, one in enumerate(first)
    ]


def report_positions(job: Job) -> None:
    """Report to server 0 which records this worker has trained on; its pushes have arrived."""
    if not job.replay.is_catching_up:
        for loader in job.loaders:
            loader.source.report()
