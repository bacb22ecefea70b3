# SPDX-License-Identifier: Apache-2.0
"""`ShardLoader`: a DataLoader that gives this worker its part of every block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from fleetlight.data.observer import BatchShare, LoaderObserver, NoObserver
from fleetlight.data.queue.client import QueueOptions
from fleetlight.data.queue.source import RangeSource
from fleetlight.data.sources.indexed import BatchSource, MapSource
from fleetlight.data.sources.source import RecordSource, Shard, refuse_unbatched
from fleetlight.data.sources.stream import StreamSource
from fleetlight.errors import CheckpointError, ComebackError, ConfigError, PeerError

#: a batch
B = TypeVar("B")


class _Loaded(NamedTuple):
    """A batch, how many of its samples count here and in all, and the position behind it."""

    batch: Any
    mine: int
    total: int
    position: dict[str, Any]


_ASK = (
    "this worker was started again and goes on in epoch {epoch}, but the script begins with the "
    "first one; write: for epoch in range(loader.epoch, epochs)"
)
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
    """Yields what the original loader would have, cut up over the workers.

    Iterating again is the next epoch, and so is a position behind the last batch. `state_dict` is
    the position; loading it makes the next iteration go on behind the batches that had been handed
    out, with any number of workers.
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
    ) -> None:
        _refuse_sharded(loader)
        self._share = Shard(worker, workers, tail)
        self._seed = seed
        self._observer = observer or NoObserver()
        #: of the batch handed out last
        self.share: BatchShare | None = None
        self._epoch = 0
        #: the script must ask for the epoch before it iterates: it may not begin at the first one
        self._must_be_asked = False
        #: samples of the current batch that count; fewer than its size in a filler only
        self.counted = 0
        #: the iteration that hands out batches now; an older one must not
        self._iteration: object = None
        #: the one whose loop goes on
        self._reading: object = None
        self._source = source_of(loader, self._share, queue)
        #: behind the batch handed out last; the source may be further
        self._position = self._source.position
        #: before that batch
        self._before = self._position
        super().__init__(**_arguments(loader), **self._source.arguments())
        # torch holds that a loader with a batch sampler has no batch size; its readers hold not
        self.__dict__["batch_size"] = loader.batch_size

    @property
    def worker(self) -> int:
        """The worker whose part this is."""
        return self._share.worker

    @property
    def workers(self) -> int:
        """How many workers share the records."""
        return self._share.workers

    @property
    def tail(self) -> str:
        """What happens to the last, short block."""
        return self._share.tail

    def settings(self) -> dict[str, object]:
        """What must be the same on all workers, for each record to be dealt out once."""
        own = {"batch_size": self.batch_size, "seed": self._seed, "tail": self.tail}
        return {**own, **self._source.settings()}

    @property
    def consumed(self) -> int:
        """Samples (or batches of an own batch sampler) handed out on all workers this epoch.

        With deal="queue" on this worker, and before a checkpoint that was loaded.
        """
        return int(self._position["consumed"])

    @property
    def samples_per_step(self) -> int | None:
        """Samples of all workers in one full step, None where batches differ in size."""
        if isinstance(self._source, (MapSource, StreamSource)) and self.batch_size:
            return self.batch_size * self.workers
        return None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration starts or continues."""
        self._must_be_asked = False
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch at the next iteration. A position just loaded in it stays."""
        if self._must_be_asked and epoch < self._epoch:
            raise ComebackError(_ASK.format(epoch=self._epoch))
        self._must_be_asked = False
        if self._iteration is not None or epoch != self._epoch:
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        self._epoch, self._iteration = epoch, None
        self._source.position = {}
        self._position = self._source.position

    def __len__(self) -> int:
        return self._source.steps()

    def __iter__(self) -> Iterator[B]:  # type: ignore[override]
        if self._must_be_asked:
            raise ComebackError(_ASK.format(epoch=self._epoch))
        if self._iteration is not None:
            self._enter(self._epoch + 1)
        self._observer.start_iteration()
        is_resumed = self._source.hides_its_end and any(self._position.values())
        # a loop inside another one's, such as a validation, leaves the outer batch its weight
        before = self._observer.set_share(None)
        try:
            is_empty = True
            for batch in self._deal():
                is_empty = False
                yield batch
            while self._source.has_more():
                yield from self._deal()
            if is_empty and is_resumed:
                # saved behind the last batch of a stream, whose length nobody knows
                self._enter(self._epoch + 1)
                yield from self._deal()
        finally:
            self._observer.set_share(before)
        self._enter(self._epoch + 1)

    def _deal(self) -> Iterator[Any]:
        me = self._iteration = object()
        self._reading = me
        try:
            yield from self._dealt(me)
        finally:
            if self._reading is me:
                self._reading = None

    def _dealt(self, me: object) -> Iterator[Any]:
        self._pause()
        self._source.begin(self._epoch, self._seed)
        self._position = self._source.position
        is_first, waits = True, not self._source.knows_its_end
        for batch, mine, total, position in self._announced(self._loaded()):
            if waits and not is_first:
                # now it is known that the epoch goes on
                self._pause()
            is_first = False
            self._observer.before_batch(self._state())
            self._source.handed_out(self._position, position)
            self._before = self._position
            self.counted, self._position = mine, position
            self.share = BatchShare(mine, total, self._epoch, self.consumed)
            self._observer.set_share(self.share)
            try:
                yield batch
            except GeneratorExit:
                if self._iteration is me:
                    # whoever calls next is told
                    with contextlib.suppress(PeerError):
                        self._source.give_back()
                raise
            if self._iteration is not me:
                raise ConfigError(
                    "this loader was started anew while it was being iterated; for two iterations "
                    "at once call fleet.shard twice"
                )
            # behind the last batch the epoch is not over yet: the script may have work to do
            if not waits and not self._source.is_at_end(self._position):
                self._pause()

    def _pause(self) -> None:
        self._observer.between_batches()

    def _loaded(self) -> Iterator[_Loaded]:
        for dealt in self._source.deal(self._torch_iterator()):
            yield _Loaded(*dealt, self._source.position)

    def _torch_iterator(self) -> Iterator[Any]:
        """To go on amid an epoch must not draw a random number that was drawn at its begin."""
        if not self.consumed:
            return super().__iter__()
        before = torch.get_rng_state()
        try:
            return super().__iter__()
        finally:
            torch.set_rng_state(before)

    def _announced(self, loaded: Iterator[_Loaded]) -> Iterator[_Loaded]:
        """The same; where that is wanted the next one is loaded before each is handed out."""
        if not self._observer.wants_lookahead():
            yield from loaded
            return
        now = next(loaded, None)
        while now is not None:
            error, coming = None, None
            try:
                coming = next(loaded, None)
            except Exception as problem:
                # it belongs to the next batch
                error = problem
            self._observer.announce([now.batch] if coming is None else [now.batch, coming.batch])
            yield now
            if error is not None:
                raise error
            now = coming

    def state_dict(self) -> dict[str, Any]:
        """The position: which epoch, and how far into it all workers together are."""
        return self._state()

    def shared_state(self) -> dict[str, Any]:
        """The same for a checkpoint, from which any number of workers go on."""
        return {**self._state(), **self._source.shared(self._position)}

    def tell(self) -> None:
        """Say how far this worker is, where somebody deals out the records on demand."""
        self._source.tell()

    def give_back(self) -> None:
        """This worker trains no more, and says so."""
        self._source.give_back()

    def _state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "seed": self._seed, **self._position}

    def put_back(self) -> None:
        """The batch in hand is not trained on: whoever goes on from here begins with it."""
        self._position = self._before
        self._source.put_back(self._before)

    @property
    def is_being_read(self) -> bool:
        """True amid a loop over it."""
        return self._reading is not None and self._reading is self._iteration

    def standing(self) -> dict[str, Any]:
        """The position, and whether the iteration was broken off there: the next is another."""
        is_broken_off = self._iteration is not None and not self.is_being_read
        return {**self._state(), "broken_off": is_broken_off}

    def go_on(self, state: Mapping[str, Any], *, must_be_asked: bool = True) -> None:
        """Load what `standing` has said, of which the script knows nothing.

        `must_be_asked`: it is to ask for the epoch, since it would begin with the first one.
        """
        self.load_state_dict(state)
        if state.get("broken_off") and self._epoch == int(state["epoch"]):
            self._iteration = object()
        self._must_be_asked = must_be_asked and self._epoch > 0

    def records_behind(self, position: Mapping[str, Any]) -> Sequence[Any] | None:
        """Which records the batch behind a position has, in the epoch that is being read.

        None where they have no numbers.
        """
        return self._source.records_behind(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; the next iteration continues its epoch."""
        state = self._source.adapted(state)
        missing = set(self._state()) - set(state)
        if missing:
            raise CheckpointError(f"a loader's position lacks {sorted(missing)}, got {dict(state)}")
        self._source.position = state
        self._position = self._source.position
        self._epoch, self._seed = int(state["epoch"]), int(state["seed"])
        self._iteration = None
        if self._source.is_at_end(self._position):
            # saved after the last batch: the epoch is done
            self._enter(self._epoch + 1)


def source_of(
    loader: DataLoader[Any], shard: Shard, queue: QueueOptions | None = None
) -> RecordSource:
    """How the records of this loader are dealt out."""
    if queue is not None:
        return RangeSource(loader, shard, queue)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, shard)
    refuse_unbatched(loader)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return BatchSource(loader.batch_sampler, shard)
    return MapSource(loader, shard)


def _refuse_sharded(loader: DataLoader[Any]) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"fleet.shard: got a {type(loader).__name__}, expected a torch DataLoader"
        )
    if isinstance(loader, ShardLoader):
        raise ConfigError("fleet.shard was called with a loader that it has made itself")
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ConfigError(
            "fleet.shard: this loader has a DistributedSampler and is sharded already; build it "
            "with shuffle=True instead"
        )


def _arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a loader that stay as they are."""
    settings = {name: getattr(loader, name) for name in _KEPT}
    if loader.num_workers > 0:
        settings["prefetch_factor"] = loader.prefetch_factor
    if not isinstance(loader.dataset, IterableDataset):
        settings["dataset"] = loader.dataset
        settings["collate_fn"] = loader.collate_fn
    return settings
