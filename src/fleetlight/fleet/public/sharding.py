# SPDX-License-Identifier: Apache-2.0
"""`fleet.shard` gives each worker its part of the records; `fleet.progress` shows the progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import Tensor
from torch.utils.data import DataLoader

from fleetlight.collective.stamp import UNKNOWN, Position
from fleetlight.errors import ConfigError, did_you_mean, names_arguments
from fleetlight.fleet.job import IdsOf, Job, current
from fleetlight.fleet.parts.background import in_main_thread
from fleetlight.fleet.protocols import BatchWeights
from fleetlight.fleet.training.worker_seeds import derive_worker_seeds
from fleetlight.observe.log import logger
from fleetlight.observe.progress import Progress

if TYPE_CHECKING:
    from fleetlight.data.loader import ShardLoader
    from fleetlight.data.observer import BatchShare
    from fleetlight.data.queue.client import QueueOptions

#: ways to deal out records
DEALS = ("blocks", "shards", "queue")
#: types whose records torch stacks into batches of the same type
T = TypeVar("T")
Batch = TypeVar("Batch", bound="Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]")


@overload
def shard(
    loader: DataLoader[Batch],
    tail: str = "join",
    lookahead: IdsOf | Literal[False] | None = None,
    deal: str = "blocks",
    range_batches: int = 16,
) -> ShardLoader[Batch]: ...
@overload
def shard(
    loader: DataLoader[Any],
    tail: str = "join",
    lookahead: IdsOf | Literal[False] | None = None,
    deal: str = "blocks",
    range_batches: int = 16,
) -> ShardLoader[Any]: ...
@names_arguments
def shard(
    loader: DataLoader[Any],
    tail: str = "join",
    lookahead: IdsOf | Literal[False] | None = None,
    deal: str = "blocks",
    range_batches: int = 16,
) -> ShardLoader[Any]:
    """Shard a DataLoader: it yields this worker's part. The batch size is per worker.

    At step i the workers together read block i (workers x batch size) of the epoch's order. With
    parameter servers (sync or async), rows of the next batch are prefetched.

    Args:
        loader: a DataLoader of torch, or of `fleet.data`.
        tail: what happens to a short last block. `"join"` splits it and weights gradients by the
            samples, `"drop"` omits it, `"pad"` fills it from the start of the epoch.
        lookahead: a function that returns `{table name: ids}` of a batch, for the prefetch. By
            default they are learned for int64 tensors that reach a table unchanged; False turns the
            prefetch off.
        deal: how records reach workers. `"blocks"`: as above. `"queue"` (async, staleness, GeoSGD):
            workers request ranges, so a faster worker trains on more records, and an epoch ends for
            all when every record is trained on. `"shards"`: each worker reads shards of its own of
            a stream that has `num_shards` and `shard`, such as HuggingFace's; as many workers must
            resume.
        range_batches: the most batches of a range, with `deal="queue"`.

    Returns:
        A `ShardLoader`, to iterate over once for each epoch.

    Raises:
        ConfigError: the loader cannot be sharded, or an argument does not fit the job.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> fleet.init(is_collective=True)
        >>> loader = fleet.shard(DataLoader(range(6), batch_size=4))
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5]]
    """
    from fleetlight.data.loader import ShardLoader

    job = current()
    _check_lookahead(lookahead)
    sharded: ShardLoader[Any] = ShardLoader(
        loader,
        worker=job.group.index,
        workers=job.group.size,
        seed=job.strategy.seed,
        tail=tail,
        observer=JobObserver(job, lookahead),
        queue=_queue(job, deal, range_batches),
        agree=job.agree_on_batches if deal == "shards" else None,
    )
    if job.autosave is not None:
        job.autosave.position_loader(sharded, len(job.loaders))
    number = len(job.loaders)
    job.loaders.append(sharded)
    position = job.replay.position_of(number)
    if position is not None:
        # the script must read the epoch of the loader that it trains on
        sharded.cursor.resume(position, must_be_asked=job.replay.is_trained_on(number))
    return sharded


def _queue(job: Job, deal: str, range_batches: int) -> QueueOptions | None:
    """The shard queue of the next loader, if it has one."""
    if deal not in DEALS:
        raise ConfigError(f"fleet.shard: got {deal=}; {did_you_mean(deal, DEALS)}")
    if deal == "queue":
        return job.shard_queue(range_batches)
    if job.role.is_elastic:
        raise ConfigError(
            f"fleet.shard: got {deal=}, but workers may join and leave while this job runs "
            f"({job.role.worker_num} to {job.role.places} workers), and then a worker has no fixed "
            "part of the records; write fleet.shard(loader, deal='queue')"
        )
    return None


def _check_lookahead(lookahead: IdsOf | Literal[False] | None) -> None:
    if lookahead is not None and lookahead is not False and not callable(lookahead):
        raise ConfigError(
            f"fleet.shard: got lookahead={lookahead!r}, expected a function that returns "
            "{table name: ids} of a batch, or False"
        )


class LoaderWeights:
    """Gives the models the weight of this worker's next gradients, and their batch's position.

    Without a share all workers have the same weight.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.now: BatchShare | None = None
        self._has_warned = False

    def set(self, share: BatchShare | None) -> BatchShare | None:
        """Set the share of the current batch; returns the previous one."""
        before, self.now = self.now, share
        if share is None:
            # a loop starts: loading processes take their seeds from this process's generator
            derive_worker_seeds(self._job)
        if share is not None and not self._job.models:
            self._warn_once()
        for managed in self._job.models:
            managed.set_batch_weight(self._weight_of(share), _position_of(share))
        return before

    def _weight_of(self, share: BatchShare | None) -> float:
        if share is None:
            return 1.0
        if self._job.averages:
            return share.mine * self._job.group.size / share.total
        return float(share.mine > 0)

    def _warn_once(self) -> None:
        if not self._has_warned and not self._job.group.alone:
            logger.warning(
                "the script reads a sharded loader, but no model is registered: each worker "
                "trains its own; call model = fleet.distributed_model(model)"
            )
        self._has_warned = True


class JobObserver:
    """The `LoaderObserver` of a job, for one loader."""

    def __init__(self, job: Job, lookahead: IdsOf | Literal[False] | None) -> None:
        self._weights, self._replay = _weights(job), job.replay
        self._loaders, self._number = job.loaders, len(job.loaders)
        self._hints = None if lookahead is False else job.prefetch_hints(lookahead)
        self._autosave, self._departure = job.autosave, job.departure

    def epoch_asked(self) -> None:
        self._replay.epoch_asked(self._number)

    def start_iteration(self) -> None:
        self._replay.loop_begins(self._number)

    def set_share(self, share: BatchShare | None) -> BatchShare | None:
        return self._weights.set(share)

    def before_batch(self, position: Mapping[str, Any]) -> None:
        self._replay.hands_out(self._number, position)
        if self._departure is not None:
            self._departure.batch_begins()

    def between_batches(self) -> None:
        """No step is in progress now; a thread that reads ahead does not know that."""
        if self._departure is not None and in_main_thread():
            self._departure.leave_if_asked()
        if self._autosave is not None and in_main_thread():
            self._autosave.between(self._loaders[self._number])

    def batches_ahead(self) -> int:
        return 0 if self._hints is None else self._hints.batches_ahead()

    def announce(self, batches: Sequence[Any]) -> None:
        if self._hints is not None:
            self._hints.announce(batches)

    def __reduce__(self) -> Any:
        from fleetlight.data.observer import NoObserver

        # in a loading process the loader has no job
        return NoObserver, ()


def _position_of(share: BatchShare | None) -> Position:
    """The position of the worker; unknown where a thread reads ahead of the training."""
    if share is None or not in_main_thread():
        return UNKNOWN
    return Position(share.epoch, share.consumed)


def _weights(job: Job) -> BatchWeights:
    """The weights, one for all loaders: the script trains on the batch returned last."""
    if job.batch_weights is None:
        job.batch_weights = LoaderWeights(job)
    return job.batch_weights


def progress(loader: Iterable[T], total: int | None = None) -> Progress[T]:
    """Wrap a loader; worker 0 shows its progress. `.show(loss=loss)` adds values.

    With parameter servers it shows the staleness of gradients, too.

    Args:
        loader: any iterable of batches.
        total: the number of batches, if the loader has no length.

    Returns:
        An iterable of the same batches.

    Example:
        >>> fleet.init(is_collective=True)
        >>> batches = fleet.progress([1, 2, 3])
        >>> for batch in batches:
        ...     batches.show(loss=1 / batch)
    """
    from fleetlight.data.loader import ShardLoader

    job = current()
    return Progress(
        loader,
        total=total,
        rank0=job.group.index == 0,
        samples_per_step=loader.samples_per_step if isinstance(loader, ShardLoader) else None,
        staleness=job.staleness,
    )
