# SPDX-License-Identifier: Apache-2.0
"""Protocols between the parts of `fleet`. This file imports nothing of `fleet`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # a job loads only what it uses
    from fleetlight.checkpoint import JobSnapshot
    from fleetlight.collective.data_parallel.replica import Replica
    from fleetlight.collective.local_training.engine import LocalTrainingEngine
    from fleetlight.collective.local_training.outer import Means
    from fleetlight.collective.stamp import Position
    from fleetlight.data.loader import ShardLoader
    from fleetlight.data.observer import BatchShare
    from fleetlight.errors import MembershipError
    from fleetlight.publication.manifest import Publication, PublicationManifest
    from fleetlight.roles.members import MemberHello


class Peers(Protocol):
    """The workers of a job and what they do together; every wait has a deadline.

    In a `collective.group.Group` workers talk to each other, in a
    `ps.worker.served_group.ServedGroup` through the servers.
    """

    index: int
    size: int
    deadline_s: float
    device: torch.device
    backend: str
    #: by worker: how it introduced itself; empty where the servers serve the rendezvous
    hellos: Mapping[int, MemberHello]

    @property
    def alone(self) -> bool:
        """True in a job of one worker."""

    def report_step(self, step: int) -> None:
        """Report that this worker has made its `step`th step; heartbeats and errors quote it."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a tensor over all workers, in place: sum, max or min."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather tensors of one type and shape, in the order of the workers."""

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Give all workers the values of worker 0, in place."""

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        """Gather bytes on all workers, in the order of the workers."""

    def bytes_to_first(self, data: bytes, operation: str) -> list[bytes]:
        """Gather bytes on worker 0, in the order of the workers; the others get none."""

    def broadcast_bytes(self, data: bytes, operation: str) -> bytes:
        """Give all workers the bytes of worker 0."""

    def assemble(self, operation: str) -> None:
        """Wait until every worker has called `operation`; the error names the missing workers."""

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until all workers are here."""

    def together(self, action: Callable[[], None] | None, operation: str) -> None:
        """Run an action on some workers; a failure on one raises on all of them."""

    def leave(self) -> None:
        """Leave the job after a good run."""

    def fail(self, error: str, *, consequence: bool = False) -> None:
        """Leave the job after an error, and send it to the others."""


class Purpose(enum.Enum):
    """Why the state of a worker is saved."""

    #: any number of workers may load it
    CHECKPOINT = enum.auto()
    #: the job resumes automatically from the checkpoint in its folder
    RESUME = enum.auto()
    #: this worker alone returns to its last step, after it was killed
    REPLAY = enum.auto()


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """The saved values of one part, and why they are loaded."""

    purpose: Purpose
    #: the step of the job
    step: int
    #: the value of worker 0, for what is equal on all workers; None: nothing was saved
    first: Any
    #: the value of this worker; None where the checkpoint is of fewer workers
    own: Any
    #: the values of all workers
    each: Sequence[Any]


class Stateful(Protocol):
    """One part of a worker's state. `fleet.checkpoints.worker_state.PARTS` lists all of them."""

    #: its key in the record of a worker
    name: ClassVar[str]
    #: why it is saved
    purposes: ClassVar[Collection[Purpose]]

    def save(self) -> Any:
        """The value now: plain data, tensors may be inside; None: nothing is saved."""

    def load(self, saved: SavedPart) -> None:
        """Continue from a saved value."""


# -- what the script has registered


class RegisteredModel(Protocol):
    """A model of the job; implemented by `training.model.ManagedModel`."""

    module: nn.Module
    #: reduces the gradients of the model among workers, where no server does
    replica: Replica | None
    #: the number of reductions before the last optimizer step
    reductions_at_step: int
    #: True once the workers have agreed on it
    frozen: bool
    #: True when a program has registered it, not the script
    is_from_program: bool

    def freeze(self) -> None:
        """Agree on the model with the other workers and apply the strategy; once."""

    def begin_training(self) -> None:
        """Prepare for the first forward that trains, or the first step."""

    def replace_module(self, module: nn.Module) -> None:
        """Manage a module that contains the one so far."""

    def set_batch_weight(self, weight: float, position: Position = ...) -> None:
        """Set the weight of this worker's next gradients, and the records they come from."""

    @property
    def weight(self) -> float:
        """The weight of the next batch's gradients."""

    @property
    def means(self) -> Means | None:
        """What averages the model's tensors over the workers, once they have agreed on it."""

    @property
    def trains_locally(self) -> bool:
        """True while this worker steps the model without the others."""

    def has_any_of(self, parameters: Iterable[Tensor]) -> bool:
        """True when some of these are parameters of the model."""

    def broadcast_buffers(self) -> None:
        """Give all workers the buffers of worker 0."""

    def rebuild_replica(self) -> None:
        """Agree again after parameters were added, frozen or unfrozen; all workers call it."""

    def close(self) -> None:
        """Give the module its own forward back."""


class MergedSteps(Protocol):
    """Several backwards that make one step; implemented by `training.gradient_merge`."""

    def is_between(self) -> bool:
        """True when the last backward is not the last of its k."""

    def complete(self) -> None:
        """Turn the gradients into those of all k backwards."""


class LocalSteps(Protocol):
    """Steps that a worker makes alone; implemented by `training.local_training`."""

    engine: LocalTrainingEngine

    @property
    def next_is_local(self) -> bool:
        """True when the worker makes the next step alone."""

    def steps_some_of(self, model: RegisteredModel) -> bool:
        """True when these steps change a parameter of the model."""

    def average(self) -> None:
        """Average the parameters of the workers now."""

    def average_with_states(self) -> None:
        """Average the states of their optimizers, too."""

    def warn_at_end(self) -> None:
        """Warn if the workers never trained alone, or still differ."""

    def describe_drift(self) -> str:
        """How many steps each worker has made alone."""


class RegisteredOptimizer(Protocol):
    """An optimizer of the job; implemented by `training.optimizer.ManagedOptimizer`."""

    optimizer: torch.optim.Optimizer

    @property
    def merge(self) -> MergedSteps | None:
        """How several backwards make one step, where the strategy asks for it."""

    @property
    def local_steps(self) -> LocalSteps | None:
        """How a worker makes its steps alone, if it ever does."""

    def freeze(self) -> None:
        """Apply the strategy as it is when training begins; once."""

    def resume_local(self, load: Callable[[LocalTrainingEngine], None]) -> None:
        """Let local training continue from the values of a checkpoint."""

    def update_trained(self, model: RegisteredModel) -> None:
        """Before a forward of the model: agree again if other parameters are trained now."""

    @property
    def steps_on_servers(self) -> int | None:
        """How many steps it has made on the servers; None where workers step."""

    def count_on_servers(self, steps: int) -> None:
        """Set how many steps it has made on the servers."""

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the loss scaler that `minimize` or a program uses, if there is one."""

    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        """Restore the loss scale."""

    def restart_merge(self) -> None:
        """Drop the merged gradients of an unfinished step, since other values were loaded."""

    def release(self) -> None:
        """Restore the optimizer as it was before its registration."""


# -- what a job offers


class BatchWeights(Protocol):
    """The weights of the loaders' batches; implemented by `public.sharding.LoaderWeights`."""

    #: the share of the last batch
    now: BatchShare | None

    def set(self, share: BatchShare | None) -> BatchShare | None:
        """Set the share of the current batch; returns the previous one."""


class Autosave(Protocol):
    """Saves, stops and resumes a job; implemented by `checkpoints.autosave.JobAutosave`."""

    #: True once the job has saved because it was asked to stop
    has_stopped: bool
    #: the number of saves and the step of the last one; equal on all workers
    saves: list[int]

    @property
    def loader_at_save(self) -> int | None:
        """The number of the loader between whose batches a save takes place."""

    def position_loader(self, loader: ShardLoader[Any], number: int) -> None:
        """Set the position of a new loader, the `number`th."""

    def resume(self) -> None:
        """Load the checkpoint of an earlier start when training begins; once."""

    def between(self, loader: ShardLoader[Any]) -> None:
        """Save or stop, if due: the script is between two batches of a loader."""

    def step_made(self) -> None:
        """Note that an optimizer has made a step."""

    def peer_missing(self, error: MembershipError) -> None:
        """Stop if the workers that this one waits for have stopped."""


class RowPublisher(Protocol):
    """Publishes rows and dense values; implemented by `served.publishing.publisher.Publisher`."""

    #: the error of the last publication, None if it is complete
    error: Exception | None

    @property
    def is_over(self) -> bool:
        """True once it publishes no longer."""

    @property
    def manifest(self) -> PublicationManifest | None:
        """The last manifest, None before the first publication."""

    def publish_now(self) -> Publication:
        """Publish now; raises what goes wrong."""

    def stop(self, *, publish: bool = True) -> None:
        """End; `publish` the last changes first."""

    def abandon(self) -> None:
        """End silently, after a failure."""


class EarlyLeave(Protocol):
    """Lets this worker leave while the job runs."""

    def batch_begins(self) -> None:
        """The script gets a batch, for which it will make a step."""

    def step_made(self) -> None:
        """An optimizer has made a step."""

    def leave_if_asked(self) -> None:
        """End this process if it is to leave; called between two batches."""


class Replay(Protocol):
    """Returns a killed worker to its last step; `served.durable.replay.WorkerReplay` does."""

    #: True until the script reaches the loop in which the earlier incarnation was
    is_catching_up: bool
    #: True for a worker that joins while the job runs
    joins: bool

    def epoch_asked(self, loader: int) -> None:
        """The script asks in which epoch a loader is."""

    def position_of(self, loader: int) -> Mapping[str, Any] | None:
        """The position at which a loader begins; None: at its first record."""

    def is_trained_on(self, loader: int) -> bool:
        """True for the loader whose batches the earlier incarnation trained on."""

    def loop_begins(self, loader: int) -> None:
        """The script begins to iterate over a loader."""

    def hands_out(self, loader: int, before: Mapping[str, Any]) -> None:
        """A loader at position `before` is about to return a batch."""

    def forget_position(self) -> None:
        """Report no position until the next step."""

    def disable(self, why: str) -> None:
        """Let no incarnation resume from the last step, after everything has arrived."""


class NoReplay:
    """The replay of a worker that keeps no state."""

    is_catching_up = False
    joins = False

    def epoch_asked(self, loader: int) -> None:
        """There is nothing to wait for."""

    def position_of(self, loader: int) -> None:
        """At its first record."""

    def is_trained_on(self, loader: int) -> bool:
        """There is no earlier incarnation."""
        return False

    def loop_begins(self, loader: int) -> None:
        """Nothing is kept."""

    def hands_out(self, loader: int, before: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def forget_position(self) -> None:
        """Nothing is kept."""

    def disable(self, why: str) -> None:
        """Nothing is kept."""


class PrefetchHints(Protocol):
    """Announces the ids of coming batches; implemented by `served.prefetch_hints.IdLookahead`."""

    def batches_ahead(self) -> int:
        """How many batches the loader reads ahead."""

    def announce(self, batches: Sequence[Any]) -> None:
        """The current batch and those after it that are loaded."""


class ServerSnapshot(Protocol):
    """The values of all servers at one moment; implemented by `served.tables.server_checkpoint`."""

    def complete(self, snapshot: JobSnapshot) -> JobSnapshot:
        """Add the values of the servers, all or what changed, to a worker's snapshot."""

    @property
    def can_retry(self) -> bool:
        """True when a lost server restarts, so that a second attempt may succeed."""

    def drop(self) -> None:
        """Free what was not saved."""


class Loading(Protocol):
    """A worker's part in loading a checkpoint."""

    def prepare(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Read and compare everything; yields the steps that then set the values."""

    def end(self) -> None:
        """Free what was read."""


class ModelValues(Protocol):
    """All values of one registered model, by the model's names."""

    def row_bytes(self) -> int:
        """Bytes of ids and rows on servers."""

    def gather(self) -> dict[str, Any]:
        """Copies of all values, on the CPU; worker 0 calls it."""

    def prepare(self, state: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        """Compare everything; yields the steps that then set the values, on worker 0."""

    def local_tensors(self) -> list[Tensor]:
        """The tensors that every worker keeps itself."""

    def wait_until_applied(self, operation: str) -> None:
        """After a load: wait until all workers have the values, where they must."""
