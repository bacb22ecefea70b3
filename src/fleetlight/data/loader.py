# SPDX-License-Identifier: Apache-2.0
"""`ShardLoader`: a DataLoader that gives this worker its part of every block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fleetlight.data.cursor import LoaderCursor
from fleetlight.data.loading_processes import surviving_sigterm
from fleetlight.data.observer import BatchShare, LoaderObserver, NoObserver
from fleetlight.data.queue.client import QueueOptions
from fleetlight.data.queue.source import RangeSource
from fleetlight.data.read_ahead import ReadAhead
from fleetlight.data.sources.indexed import BatchSource, MapSource
from fleetlight.data.sources.lane_source import LaneSource
from fleetlight.data.sources.source import (
    RecordSource,
    Shard,
    is_batched_by_torch,
    refuse_unbatched,
)
from fleetlight.data.sources.split_stream import Agree, SplitSource
from fleetlight.data.sources.stream import StreamSource
from fleetlight.data.sources.windows import WindowSampler
from fleetlight.errors import ConfigError, PeerError
from fleetlight.observe.telemetry.step_times import DATA, step_times

#: makes torch's iterator over the batches
Load = Callable[[], Iterator[Any]]


class _Loaded(NamedTuple):
    """A batch, how many of its samples count here and in all, and the position after it."""

    batch: Any
    mine: int
    total: int
    position: dict[str, Any]


class BatchLoop:
    """Loads batches, counts them, reports them to the observer and hands them out."""

    def __init__(
        self, source: RecordSource, cursor: LoaderCursor, observer: LoaderObserver
    ) -> None:
        self._source, self._cursor, self._observer = source, cursor, observer
        #: of the batch handed out last
        self.share: BatchShare | None = None

    def run(self, load: Load) -> Iterator[Any]:
        """The rest of an epoch, as one loop of the script."""
        cursor, source = self._cursor, self._source
        cursor.start_loop()
        self._observer.start_iteration()
        may_be_over = source.may_resume_at_end and any(cursor.position.values())
        # a loop inside another one, such as a validation, gives the outer batch its weight back
        outer = self._observer.set_share(None)
        try:
            is_empty = True
            for batch in self._iterate(load):
                is_empty = False
                yield batch
            while source.has_more():
                yield from self._iterate(load)
            if is_empty and may_be_over:
                # saved after the last batch of a stream, whose length is unknown
                cursor.enter(cursor.epoch + 1)
                yield from self._iterate(load)
        finally:
            self._observer.set_share(outer)
        cursor.enter(cursor.epoch + 1)

    def _iterate(self, load: Load) -> Iterator[Any]:
        """All batches of one iterator of torch."""
        cursor, source = self._cursor, self._source
        with cursor.iteration() as me:
            self._observer.between_batches()
            source.begin(cursor.epoch, cursor.seed)
            cursor.rewind()
            for number, loaded in enumerate(self._looking_ahead(self._counted(load))):
                if number and not source.knows_its_end:
                    # only now it is known that the epoch has another batch
                    self._observer.between_batches()
                self._hand_out(loaded)
                try:
                    yield loaded.batch
                except GeneratorExit:
                    if cursor.is_current(me):
                        # the next call of a worker that needs its peers raises the error
                        with contextlib.suppress(PeerError):
                            source.give_back()
                    raise
                cursor.check_current(me)
                # after the last batch the epoch is not over: the script may have work to do
                if source.knows_its_end and not source.is_at_end(cursor.position):
                    self._observer.between_batches()

    def _hand_out(self, loaded: _Loaded) -> None:
        """Move past a batch and report what it counts."""
        cursor = self._cursor
        cursor.position = self._source.before(cursor.position, loaded.position, loaded.total)
        self._observer.before_batch(cursor.state())
        self._source.handed_out(cursor.position, loaded.position)
        cursor.advance(loaded.position)
        self.share = BatchShare(loaded.mine, loaded.total, cursor.epoch, cursor.consumed)
        self._observer.set_share(self.share)

    def _counted(self, load: Load) -> Iterator[_Loaded]:
        for dealt in self._source.counted(self._opened(load)):
            yield _Loaded(*dealt, self._source.position)

    def _opened(self, load: Load) -> Iterator[Any]:
        """torch's iterator; within an epoch it must not draw its start's random number again."""
        if not self._cursor.consumed:
            return load()
        before = torch.get_rng_state()
        try:
            return load()
        finally:
            torch.set_rng_state(before)

    def _looking_ahead(self, loaded: Iterator[_Loaded]) -> Iterator[_Loaded]:
        """All of them; the observer may want batches loaded before the one handed out."""
        ahead = self._observer.batches_ahead()
        if not ahead:
            yield from loaded
            return
        early = ReadAhead(loaded)
        while early.peek(1):
            self._observer.announce([one.batch for one in early.peek(1 + ahead)])
            yield next(early)
        # an error of the batch after those loaded
        yield from early


#: a batch
B = TypeVar("B")

# not in_order: batches must come in the order in which they are counted
_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "persistent_workers",
    "pin_memory_device",
)


class ShardLoader(DataLoader[Any], Generic[B]):
    """Yields the batches of the original loader, sharded over the workers.

    Each iteration is the next epoch. `state_dict` is the position. After `load_state_dict` the next
    iteration continues after the batches handed out before, with any number of workers.

    Args:
        loader: the original loader; `fleet.shard` makes these loaders.
        worker: the index of this worker.
        workers: the number of workers.
        seed: the seed of the order of records.
        tail: what happens to a short last block, as in `fleet.shard`.
        observer: is told of batches before they are handed out.
        queue: the options of `deal="queue"`.
        agree: makes all workers agree, for `deal="shards"`.

    Raises:
        ConfigError: the loader cannot be sharded.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> fleet.init(is_collective=True)
        >>> loader = fleet.shard(DataLoader(range(6), batch_size=2))
        >>> batches = iter(loader)
        >>> next(batches)
        tensor([0, 1])
        >>> position = loader.state_dict()
        >>> batches.close()
        >>> loader.load_state_dict(position)
        >>> next(iter(loader))
        tensor([2, 3])
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        worker: int,
        workers: int,
        seed: int,
        tail: str,
        observer: LoaderObserver | None = None,
        queue: QueueOptions | None = None,
        agree: Agree | None = None,
    ) -> None:
        """Shard a loader; with `queue` or `agree` by a queue, or by the shards of a stream."""
        _refuse_sharded(loader)
        self._shard = Shard(worker, workers, tail)
        #: for the job: where the records come from, and how far the loader is
        self.source = _source_of(loader, self._shard, queue, agree)
        self.cursor = LoaderCursor(self.source, seed)
        self._observer = observer or NoObserver()
        self._loop = BatchLoop(self.source, self.cursor, self._observer)
        super().__init__(**{**_arguments(loader), **self.source.arguments()})
        # torch gives a loader with a batch sampler no batch size; readers of this one need it
        self.__dict__["batch_size"] = loader.batch_size

    @property
    def worker(self) -> int:
        """The worker that reads this loader."""
        return self._shard.worker

    @property
    def workers(self) -> int:
        """How many workers share the records."""
        return self._shard.workers

    @property
    def tail(self) -> str:
        """How the last, short block is treated."""
        return self._shard.tail

    def settings(self) -> dict[str, object]:
        """Settings that must be the same on all workers, so that each record is read once."""
        own = {"batch_size": self.batch_size, "seed": self.cursor.seed, "tail": self.tail}
        return {**own, **self.source.settings()}

    @property
    def consumed(self) -> int:
        """Samples (or batches of a batch sampler) handed out on all workers this epoch.

        With deal="queue": on this worker, plus those before a checkpoint that was loaded.
        """
        return self.cursor.consumed

    @property
    def samples_per_step(self) -> int | None:
        """Samples of all workers in one full step, None where batches differ in size."""
        if (
            isinstance(self.source, (LaneSource, MapSource, SplitSource, StreamSource))
            and self.batch_size
        ):
            return self.batch_size * self.workers
        return None

    @property
    def counted(self) -> int:
        """Samples of the current batch that count; fewer than its size only in a filler."""
        return 0 if self.share is None else self.share.mine

    @property
    def share(self) -> BatchShare | None:
        """How much the batch handed out last counts."""
        return self._loop.share

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration starts or continues."""
        self._observer.epoch_asked()
        return self.cursor.ask_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch at the next iteration. A position just loaded in it stays."""
        self.cursor.set_epoch(epoch)

    def __len__(self) -> int:
        return self.source.steps()

    def __iter__(self) -> Iterator[B]:  # type: ignore[override]
        return _timed(self._loop.run(super().__iter__))

    def state_dict(self) -> dict[str, Any]:
        """The position: which epoch, and how far into it all workers together are."""
        return self.cursor.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position; the next iteration continues its epoch."""
        self.cursor.load(state)


def _timed(batches: Iterator[B]) -> Iterator[B]:
    """The same batches; the time until each of them counts as data."""
    with contextlib.closing(batches):  # type: ignore[type-var]  # a generator
        while True:
            before = step_times.enter(DATA)
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                step_times.leave(before)
            yield batch


def _source_of(
    loader: DataLoader[Any], shard: Shard, queue: QueueOptions | None, agree: Agree | None
) -> RecordSource:
    if agree is not None:
        return SplitSource(loader, shard, agree)
    if queue is not None:
        return RangeSource(loader, shard, queue)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, shard)
    refuse_unbatched(loader)
    if not is_batched_by_torch(loader):
        return BatchSource(loader.batch_sampler, shard)
    if isinstance(loader.sampler, WindowSampler):
        return LaneSource(loader, loader.sampler, shard)
    return MapSource(loader, shard)


def _refuse_sharded(loader: DataLoader[Any]) -> None:
    if not isinstance(loader, DataLoader):
        is_stateful = hasattr(loader, "dataset") and hasattr(loader, "state_dict")
        advice = "; it resumes any DataLoader within an epoch" if is_stateful else ""
        raise ConfigError(
            f"fleet.shard: got a {type(loader).__name__}, expected a torch DataLoader{advice}"
        )
    if isinstance(loader, ShardLoader):
        raise ConfigError("fleet.shard: got a loader that fleet.shard returned; shard it once")
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ConfigError(
            "fleet.shard: this loader has a DistributedSampler and is sharded already; build it "
            "with shuffle=True instead"
        )
    # a mark of HuggingFace's
    if getattr(loader.dataset, "__dict__", {}).get("_distributed") is not None:
        raise ConfigError(
            "fleet.shard: this dataset was split by split_dataset_by_node already; leave that out, "
            "and write fleet.shard(loader, deal='shards') for a stream whose workers read files of "
            "their own"
        )


def _arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of the original loader that stay as they are."""
    settings = {name: getattr(loader, name) for name in _KEPT}
    if loader.num_workers > 0:
        settings["worker_init_fn"] = surviving_sigterm(loader.worker_init_fn)
        settings["prefetch_factor"] = loader.prefetch_factor
    if not isinstance(loader.dataset, IterableDataset):
        settings["dataset"] = loader.dataset
        settings["collate_fn"] = loader.collate_fn
    return settings
