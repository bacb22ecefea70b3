# SPDX-License-Identifier: Apache-2.0
"""`Job`: the part of this process in its job, and what the script has registered."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fleetlight.errors import CheckpointError, ConfigError, PlanError, RoleError
from fleetlight.fleet.parts.background import BackgroundSave
from fleetlight.fleet.protocols import (
    Autosave,
    BatchWeights,
    EarlyLeave,
    Loading,
    ModelValues,
    NoReplay,
    Peers,
    PrefetchHints,
    RegisteredModel,
    RegisteredOptimizer,
    Replay,
    RowPublisher,
    ServerSnapshot,
)
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.registry import Value
from fleetlight.observe.telemetry.step_times import step_times
from fleetlight.roles import Role
from fleetlight.security.context import Contexts
from fleetlight.strategy import DistributedStrategy
from fleetlight.torch_compat.optimizers import has_scheduler

if TYPE_CHECKING:
    from fleetlight.checkpoint import Bases, Checkpoint
    from fleetlight.collective.codecs.compression import Compression
    from fleetlight.collective.group import Group
    from fleetlight.data.loader import ShardLoader
    from fleetlight.data.queue.client import QueueOptions
    from fleetlight.fleet.parts.loss import LossProbe
    from fleetlight.fleet.parts.publishing import PublishOptions
    from fleetlight.static.program import Program

States = Sequence[Mapping[str, Any]]


class Schedulers:
    """The attached schedulers, in the order of the script."""

    def __init__(self) -> None:
        self._attached: list[LRScheduler] = []
        #: numbers of the optimizers with a warning
        self._warned: set[int] = set()

    def attach(self, scheduler: LRScheduler) -> None:
        """Save and resume a scheduler with the job; a second call does nothing."""
        if not any(scheduler is one for one in self._attached):
            self._attached.append(scheduler)

    def of(self, optimizers: Collection[torch.optim.Optimizer]) -> list[LRScheduler]:
        """The attached schedulers of some optimizers."""
        known = {id(optimizer) for optimizer in optimizers}
        return [one for one in self._attached if id(getattr(one, "optimizer", None)) in known]

    def warn_of_unattached(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Warn once of each optimizer whose scheduler would restart when the job resumes."""
        for number in self._unattached(optimizers):
            if number not in self._warned:
                self._warned.add(number)
                logger.warning(
                    "a learning-rate scheduler of optimizer %d is not attached, so it is not saved "
                    "with the job; call fleet.attach(scheduler=scheduler) after making it",
                    number,
                )

    def _unattached(self, optimizers: Collection[torch.optim.Optimizer]) -> list[int]:
        attached = {id(one.optimizer) for one in self.of(optimizers)}
        return [
            number
            for number, optimizer in enumerate(optimizers)
            if id(optimizer) not in attached and has_scheduler(optimizer)
        ]

    def states(self, optimizers: Collection[torch.optim.Optimizer]) -> list[dict[str, Any]]:
        """The class and the state of each scheduler."""
        return [
            {"class": type(one).__name__, "state": one.state_dict()} for one in self.of(optimizers)
        ]

    def load(self, states: States, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Load the states of a checkpoint."""
        if left := self._unattached(optimizers):
            raise CheckpointError(
                f"a learning-rate scheduler of optimizer {left[0]} is not attached, so it would "
                "restart while the job resumes; call fleet.attach(scheduler=scheduler) after "
                "making it, before the first batch"
            )
        there = self.of(optimizers)
        mine = [type(one).__name__ for one in there]
        saved = [str(state["class"]) for state in states]
        if mine != saved:
            raise CheckpointError(
                f"the checkpoint was saved with the schedulers {_listed(saved)}, this job has "
                f"{_listed(mine)}; attach the same ones in the same order, before the first batch: "
                "fleet.attach(scheduler=scheduler)"
            )
        for one, state in zip(there, states, strict=True):
            one.load_state_dict(_in_its_types(one, state["state"]))
        if there:
            logger.debug("schedulers resume: %s", _listed(mine))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _in_its_types(scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
    """Restore Counters, such as milestones: a checkpoint stores them as plain dicts."""
    return {
        name: collections.Counter(value)
        if isinstance(getattr(scheduler, name, None), collections.Counter)
        else value
        for name, value in state.items()
    }


#: returns the ids that a batch looks up, by name of the table
IdsOf = Callable[[Any], Mapping[str, Tensor]]
#: makes a plain layer of torch from one whose rows are on servers
PlainLayer = Callable[[nn.Module], nn.Module]
#: the ids to export of each table, by its name, or "all"
Rows = str | Mapping[str, Tensor]


class ShrunkTable(NamedTuple):
    """How many rows a table has removed, and how many are left."""

    removed: int
    left: int


@dataclasses.dataclass
class Job(abc.ABC):
    """What this process does, from `fleet.init` to its end; `fleet.init` chooses the class.

    `collective.job.CollectiveJob`, `served.job.ServedJob` and `server.job.ServerJob`. Methods that
    do nothing here are hooks for the jobs that need them.
    """

    role: Role
    group: Peers
    strategy: DistributedStrategy
    #: encrypts connections, even after a later strategy; None: they are plain
    tls: Contexts | None = None
    #: the call of the script that gave the strategy; empty: none did
    strategy_from: str = ""
    models: list[RegisteredModel] = dataclasses.field(default_factory=list)
    optimizers: list[RegisteredOptimizer] = dataclasses.field(default_factory=list)
    #: how the gradients of a model cross between hosts
    compressions: dict[nn.Module, Compression] = dataclasses.field(default_factory=dict)
    loaders: list[ShardLoader[Any]] = dataclasses.field(default_factory=list)
    background_save: BackgroundSave = dataclasses.field(default_factory=BackgroundSave)
    #: the weights of the loaders' batches
    batch_weights: BatchWeights | None = None
    #: announces the batches of `fleet.run_steps`
    step_hints: PrefetchHints | None = None
    #: the loss of the last backward, where a schedule depends on it
    loss_probe: LossProbe | None = None
    #: saves, stops and resumes the job, where the strategy names a folder
    autosave: Autosave | None = None
    #: learning-rate schedulers and loss scalers given to `fleet.attach`
    schedulers: Schedulers = dataclasses.field(default_factory=Schedulers)
    scalers: list[torch.amp.GradScaler] = dataclasses.field(default_factory=list)
    #: publishes rows and dense values, on worker 0, where the script asks for it
    publisher: RowPublisher | None = None
    #: returns this worker to its last step, after it was killed
    replay: Replay = dataclasses.field(default_factory=NoReplay)
    #: lets this worker leave while the job runs, if it may
    departure: EarlyLeave | None = None
    #: the number of blocks and features that keep gradients local now
    no_sync_depth: int = 0
    #: optimizer steps made so far
    step: int = 0
    #: samples of this worker in these steps, where a loader of `fleet.shard` counts them
    samples: int = 0
    #: steps that all workers dropped for an infinity
    skipped: int = 0
    #: called after each step, while a trace is recorded
    step_made: Callable[[], None] | None = None
    #: called when another strategy replaces this one, where metrics are recorded
    strategy_changes: Callable[[], None] | None = None
    #: called once, with the first program that trains, where metrics are recorded
    program_runs: Callable[[Program], None] | None = None
    #: where servers and workers keep their state; absolute, since the script may change directory
    durability_dir: Path = dataclasses.field(init=False)
    #: what leaving the job does; the last callback runs first
    closers: contextlib.ExitStack = dataclasses.field(
        init=False, default_factory=contextlib.ExitStack
    )

    def __post_init__(self) -> None:
        self.durability_dir = durability_dir(self.strategy)

    # -- registration

    @abc.abstractmethod
    def manage_model(self, module: nn.Module) -> RegisteredModel:
        """What `distributed_model` registers."""

    @abc.abstractmethod
    def manage_optimizer(self, optimizer: torch.optim.Optimizer) -> RegisteredOptimizer:
        """What `distributed_optimizer` registers."""

    def check_not_late(self, call: str) -> None:
        """PlanError where a model or an optimizer is registered too late."""

    @abc.abstractmethod
    def check_model(self, module: nn.Module) -> None:
        """PlanError for a model that this job cannot train."""

    def agree_on_models(self) -> None:
        """Apply the strategy to the models on all workers, and resume where that is asked."""
        for model in self.models:
            model.freeze()
        if self.autosave is not None and self.models:
            self.autosave.resume()

    def served_optimizers(self) -> list[RegisteredOptimizer]:
        """The optimizers whose steps the servers take part in."""
        return [one for one in self.optimizers if one.steps_on_servers is not None]

    # -- a step

    @property
    def worker_num(self) -> int:
        """How many workers train now."""
        return self.role.worker_num

    @property
    def averages(self) -> bool:
        """True when gradients are averaged; `gradient_scale="sum"` is for collective jobs only."""
        return True

    @property
    def dense_group(self) -> Group | None:
        """The workers that reduce dense gradients among themselves; None where servers do."""
        return None

    @property
    def collective_group(self) -> Group | None:
        """All workers, where they reduce all gradients among themselves; None with servers."""
        return None

    def staleness(self) -> float | None:
        """The mean staleness of gradients so far, where servers count it."""
        return None

    @abc.abstractmethod
    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients by their norm, over all workers where they step together."""

    def count_step(self, applied: bool = True) -> None:
        """Count a step that was made, or dropped by all workers."""
        share = None if self.batch_weights is None else self.batch_weights.now
        self.samples += 0 if share is None else share.mine
        self.step += applied
        self.skipped += not applied
        if self.step_made is not None:
            self.step_made()

    def server_clocks(self) -> dict[str, int]:
        """What the clock of each server shows, by name, in nanoseconds since 1970."""
        return {}

    def metrics(self) -> dict[str, Value]:
        """The metrics of this process, by the names of the catalogue."""
        return {
            "steps": self.step,
            "samples": self.samples,
            "skipped_steps": self.skipped,
            **step_times.metrics(),
        }

    # -- the course of the job

    def open(self) -> None:
        """Agree with the servers, where there are any, on the plan and the first values; once."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """What `init_worker` does: the workers agree on the models now."""

    def barrier(self) -> None:
        """Wait for all workers, and make them equal."""
        self.group.barrier("barrier_worker")

    def at_rest(self, *, everything: bool = False) -> contextlib.AbstractContextManager[None]:
        """Inside the block nothing of this worker is in flight to other processes."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def watch_terminations(self) -> None:
        """Save and stop at SIGTERM from now on, where the strategy names a folder."""

    def finish(self) -> None:
        """After the last step: wait until everything that this worker has sent is applied."""

    def fail(self, error: str, *, consequence: bool) -> None:
        """Send an error of this process to the others, and wait for none of them."""
        self.group.fail(error, consequence=consequence)

    def release_layers(self) -> None:
        """Disconnect layers from the values of the job."""

    def refuse_in_server(self, call: str) -> None:
        """RoleError in a parameter server, for calls that are for workers."""

    # -- data

    @property
    def reads_shards(self) -> bool:
        """True during a loop over a loader of `fleet.shard`.

        It counts and announces what it hands out, so nothing else may read it ahead.
        """
        return any(loader.cursor.is_being_read for loader in self.loaders)

    def prefetch_hints(self, ids_of_batch: IdsOf | None) -> PrefetchHints | None:
        """Announces the ids of a loader's next batch; None: no rows are fetched."""
        return None

    @abc.abstractmethod
    def shard_queue(self, range_batches: int) -> QueueOptions:
        """Where the next loader asks for its records, range by range."""

    def agree_on_batches(self, samples: Sequence[int]) -> list[list[int]] | None:
        """By worker, how many samples its next batches have; all workers call it together.

        None where workers do not make their steps together: none of them waits then.
        """
        if self.group.alone:
            return [list(samples)]
        gathered = self.group.all_gather(torch.tensor(samples, dtype=torch.int64))
        return [one.tolist() for one in gathered]

    # -- state

    @property
    def is_untrained(self) -> bool:
        """True for a killed worker that had made no step: it needs no checkpoint to resume."""
        return False

    @property
    def reads_tables(self) -> bool:
        """True where workers read the tables of a checkpoint, not servers."""
        return False

    def run_once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """The result of `action`; the next incarnation of this worker gets it from its log."""
        return action()

    def finish_background_save(self) -> None:
        """Wait for the previous save, and raise its failure unless the next save replaces it."""
        self.background_save.finish()

    def server_snapshot(
        self, model: nn.Module, via: str, bases: Bases | None = None
    ) -> ServerSnapshot | None:
        """The servers' part of a checkpoint, on worker 0; None without servers."""
        return None

    @abc.abstractmethod
    def loading(self, saved: Checkpoint, via: str) -> Loading:
        """This worker's part in loading a checkpoint."""

    @abc.abstractmethod
    def values_of(self, model: nn.Module) -> ModelValues:
        """All values of a registered model, wherever they are stored."""

    def plain_layers(self, rows: Rows) -> contextlib.AbstractContextManager[PlainLayer | None]:
        """Inside the block: makes plain layers of torch; None where all layers have their rows."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        """What `fleet.shrink` does."""

    def publish(self, options: PublishOptions) -> RowPublisher | None:
        """What `fleet.publish` does."""
        raise PlanError(
            "fleet.publish: this job has no parameter servers, whose rows it publishes; start the "
            "script with servers or as one process with fleet.init(), or export the model with "
            "fleet.save_inference_model"
        )

    # -- servers

    def init_server(self, dirname: str | None) -> None:
        """What `fleet.init_server` does."""
        raise _no_server("init_server")

    def run_server(self) -> None:
        """What `fleet.run_server` does."""
        raise _no_server("run_server")


def _no_server(call: str) -> RoleError:
    return RoleError(
        f"fleet.{call} was called in a worker; call it only where fleet.is_server() is true"
    )


def durability_dir(strategy: DistributedStrategy) -> Path:
    """The folder for state that must outlive a process; absolute when durability is on."""
    folder = Path(strategy.durability_configs.folder)
    return folder if strategy.durability == "none" else folder.absolute()


_job: Job | None = None
#: the last job, even after it was left
_last: weakref.ref[Job] | None = None


def current() -> Job:
    """The job; ConfigError before `fleet.init`."""
    if _job is None:
        raise ConfigError(
            "Fleetlight is not initialised; call fleet.init() first, or "
            "fleet.init(is_collective=True) for training without parameter servers"
        )
    return _job


def current_or_none() -> Job | None:
    """The job; None before `fleet.init` and after the process has left the job."""
    return _job


def set_current(job: Job | None) -> None:
    """Set the job of this process."""
    global _job, _last
    _job = job
    if job is not None:
        _last = weakref.ref(job)


def last_or_none() -> Job | None:
    """The job, or the last one while it is still referenced."""
    return None if _last is None else _last()
