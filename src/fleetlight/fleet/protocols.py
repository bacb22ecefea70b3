# SPDX-License-Identifier: Apache-2.0
"""The protocols by which the parts of `fleet` know each other. Imports nothing of `fleet`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import JobSnapshot
from fleetlight.collective.data_parallel.replica import Replica
from fleetlight.collective.local_training.engine import LocalTrainingEngine
from fleetlight.collective.local_training.outer import Means
from fleetlight.collective.membership.members import MemberHello
from fleetlight.collective.stamp import Position
from fleetlight.data.loader import ShardLoader
from fleetlight.data.observer import BatchShare
from fleetlight.errors import MembershipError


class Peers(Protocol):
    """The workers of the job and what they do together; every wait has a deadline.

    `collective.group.Group` is among themselves, `ps.worker.crew.Crew` by way of the servers.
    """

    index: int
    size: int
    deadline_s: float
    device: torch.device
    backend: str
    #: by worker: how it introduced itself; empty where workers meet through servers
    hellos: Mapping[int, MemberHello]

    @property
    def alone(self) -> bool:
        """True when there is nobody to talk to."""

    def tell_step(self, step: int) -> None:
        """This worker has made its `step`th step: signs of life and errors say so."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a tensor over all workers, in place: sum, max or min."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, in the order of the workers; alike in type and shape."""

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Worker 0's values, in place, on all workers."""

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        """Everybody's bytes, in the order of the workers, on all workers."""

    def bytes_to_first(self, data: bytes, operation: str) -> list[bytes]:
        """Everybody's bytes, in the order of the workers, on worker 0; none on the others."""

    def broadcast_bytes(self, data: bytes, operation: str) -> bytes:
        """Worker 0's bytes, on all workers."""

    def assemble(self, operation: str) -> None:
        """Wait until every worker has called `operation`, and name who has not."""

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until all workers are here."""

    def together(self, action: Callable[[], None] | None, operation: str) -> None:
        """Do something that may fail on some workers; a failure is an error on all of them."""

    def leave(self) -> None:
        """After a good run: say goodbye."""

    def fail(self, error: str, *, consequence: bool = False) -> None:
        """After a bad run: tell the others why."""


class Purpose(enum.Enum):
    """Why the state of a worker is kept."""

    #: any number of workers may load it
    CHECKPOINT = enum.auto()
    #: the job resumes by itself from the checkpoint in its folder
    RESUME = enum.auto()
    #: this worker alone goes back to its last step, after it was killed
    REPLAY = enum.auto()


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """What was kept of one part, and why."""

    purpose: Purpose
    #: the step of the job
    step: int
    #: by worker 0, for what all workers have alike; None: nothing
    first: Any
    #: by this worker; None where the checkpoint is of fewer workers
    own: Any
    #: by every worker
    each: Sequence[Any]


class Stateful(Protocol):
    """One part of a worker's state. `fleet.worker_state.PARTS` lists all of them."""

    #: its key in the record of a worker
    name: ClassVar[str]
    #: why it is kept
    purposes: ClassVar[Collection[Purpose]]

    def save(self) -> Any:
        """The value now: plain data, tensors may be inside; None: nothing is kept."""

    def load(self, saved: SavedPart) -> None:
        """Continue where the value was saved."""


# -- what the script has registered


class RegisteredModel(Protocol):
    """A model of the job; `training.model.ModelPlan` is the only one."""

    module: nn.Module
    #: reduces the gradients of the model among workers, where they do that themselves
    replica: Replica | None
    #: how many reductions there had been when an optimizer stepped last
    stepped: int
    #: True once the workers have agreed on it
    frozen: bool
    #: True when a program has registered it, and no line of the script
    of_program: bool
    #: what a program's parts were called in checkpoints of older versions, and are called now
    former_names: dict[str, str]

    def freeze(self) -> None:
        """Agree on the model with the other workers and apply the strategy; once."""

    def begin(self) -> None:
        """A forward that trains, or a step, is about to be made."""

    def widen(self, module: nn.Module) -> None:
        """Stand for a module that has all of this one."""

    def weigh(self, weight: float, position: Position = ...) -> None:
        """What the coming gradients of this worker weigh, and which records they come from."""

    @property
    def weight(self) -> float:
        """What the gradients of the coming batch weigh."""

    @property
    def means(self) -> Means | None:
        """Who takes means over the workers for it, once they have agreed on it."""

    @property
    def trains_alone(self) -> bool:
        """True while this worker makes steps of its own with the model."""

    def has_any_of(self, parameters: Iterable[Tensor]) -> bool:
        """True when some of these are parameters of the model."""

    def share_buffers(self) -> None:
        """Give worker 0's buffers to all workers."""

    def replicate_again(self) -> None:
        """Parameters were added, frozen or unfrozen: all workers agree anew."""

    def close(self) -> None:
        """Let go of the module; its forward is its own again."""


class MergedSteps(Protocol):
    """Backwards that make one step together; `training.gradient_merge.StepMerge`."""

    def is_between(self) -> bool:
        """True when the backward just made is not the last of its k."""

    def complete(self) -> None:
        """Make the gradients those of all k parts."""


class LocalSteps(Protocol):
    """Steps that a worker makes alone; `training.local_training.LocalTraining`."""

    engine: LocalTrainingEngine

    @property
    def now(self) -> bool:
        """True when the coming step is made alone."""

    def trains_some_of(self, model: RegisteredModel) -> bool:
        """Whether these steps change a parameter of the model."""

    def meet(self) -> None:
        """Let the workers be equal now."""

    def settle(self) -> None:
        """Let the states of their optimizers be equal, too."""

    def tell_at_end(self) -> None:
        """Warn if the workers never trained alone, or still differ."""

    def how_far_apart(self) -> str:
        """Since when each worker has trained for itself."""


class RegisteredOptimizer(Protocol):
    """An optimizer of the job; `training.optimizer.StepPlan` is the only one."""

    optimizer: torch.optim.Optimizer

    @property
    def merge(self) -> MergedSteps | None:
        """How several backwards make one step, where the strategy says so."""

    @property
    def alone(self) -> LocalSteps | None:
        """How its steps are made alone, if they ever are."""

    def freeze(self) -> None:
        """Apply the strategy as it is when training begins; once."""

    def go_on(self, there: Callable[[LocalTrainingEngine], None]) -> None:
        """Values of a checkpoint were loaded: what trains alone goes on from there."""

    def notice_changes(self, model: RegisteredModel) -> None:
        """A forward of the model comes: agree anew now, where other parameters are trained."""

    @property
    def steps_on_servers(self) -> int | None:
        """How many steps it has made on the servers; None where workers step."""

    def count_on_servers(self, steps: int) -> None:
        """So many steps were made on the servers before."""

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the loss scaler that `minimize` or a program uses, if one does."""

    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        """Take up the loss scale where it was."""

    def restart_merge(self) -> None:
        """Drop what was merged of a step that is not made: other values have been loaded."""

    def release(self) -> None:
        """Leave the optimizer as it was."""


# -- what a job offers


class BatchWeights(Protocol):
    """What the batches of the loaders weigh; `public.sharding.Weights`."""

    #: the share of the batch handed out last
    now: BatchShare | None

    def set(self, share: BatchShare | None) -> BatchShare | None:
        """Set the share of the batch handed out now; returns the one before."""


class Autosave(Protocol):
    """How a job saves by itself, stops and resumes; `checkpoints.stopping.Stopping`."""

    #: True once the job has saved because it was asked to stop
    is_over: bool
    #: how many saves have been made, and after which step the last one: the same on all workers
    saves: list[int]

    @property
    def place_now(self) -> int | None:
        """Between two batches of which loader the script is, while it saves."""

    def place(self, loader: ShardLoader[Any], number: int) -> None:
        """A loader was made, as the `number`th."""

    def take_up(self) -> None:
        """Training begins: what an earlier start has saved is put in place, once."""

    def between(self, loader: ShardLoader[Any]) -> None:
        """The script is between two batches of a loader."""

    def step_made(self) -> None:
        """An optimizer has made a step."""

    def left_alone(self, error: MembershipError) -> None:
        """Others do not come whom this worker waits for: where they stop, so does it."""


class Replay(Protocol):
    """How a worker that was killed returns to its last step; `served.replay.WorkerReplay`."""

    #: False once the script has come to the loop in which the life before was
    is_catching_up: bool

    @property
    def keeps(self) -> bool:
        """True where a later life of this worker resumes where this one stops."""

    def position_of(self, loader: int) -> Mapping[str, Any] | None:
        """Where a loader is to begin; None: at its beginning."""

    def is_trained_on(self, loader: int) -> bool:
        """True for the loader whose batches the life before made its steps with."""

    def begins(self, loader: int) -> None:
        """The script begins to iterate a loader."""

    def hands_out(self, loader: int, before: Mapping[str, Any]) -> None:
        """A loader that was at `before` is about to hand out a batch."""

    def lose(self) -> None:
        """Where the worker is, only its next step tells."""

    def give_up(self, why: str) -> None:
        """The same, where nothing is on its way any more."""


class NoReplay:
    """The replay of a worker that keeps nothing of itself."""

    is_catching_up = False
    keeps = False

    def position_of(self, loader: int) -> None:
        """At its beginning."""

    def is_trained_on(self, loader: int) -> bool:
        """There was no life before."""
        return False

    def begins(self, loader: int) -> None:
        """Nothing is kept."""

    def hands_out(self, loader: int, before: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def lose(self) -> None:
        """Nothing is kept."""

    def give_up(self, why: str) -> None:
        """Nothing is kept."""


class PrefetchHints(Protocol):
    """Tells which ids the coming batch has; `served.prefetch_hints.IdHints`."""

    def wanted(self) -> bool:
        """True when a batch is to be loaded ahead."""

    def announce(self, batches: Sequence[Any]) -> None:
        """The batch handed out now, and the one after it, if there is one."""


class ServerCut(Protocol):
    """What the servers hold at one moment; `served.tables.server_checkpoint`."""

    def completed(self, snapshot: JobSnapshot) -> JobSnapshot:
        """A worker's snapshot with what the servers have."""

    @property
    def may_be_made_again(self) -> bool:
        """Whether a server that is lost comes back, for another cut."""

    def drop(self) -> None:
        """Let go of what was not saved."""


class Loading(Protocol):
    """A worker's part in loading a checkpoint."""

    def fitted(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Read and compare everything; the steps that then put it in place."""

    def end(self) -> None:
        """Let go of what was read."""


class ModelValues(Protocol):
    """All values of one registered model, by the names that the model has for them."""

    def row_bytes(self) -> int:
        """Bytes of ids and rows that are on servers."""

    def gathered(self) -> dict[str, Any]:
        """Copies of all values, on the CPU; worker 0 asks."""

    def fitted(self, state: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        """Compare everything; the steps that then put it in place, on worker 0."""

    def held_here(self) -> list[Tensor]:
        """What every worker keeps itself."""

    def taken(self, operation: str) -> None:
        """After a load: wait until all workers have taken the values, where they must."""
