# SPDX-License-Identifier: Apache-2.0
"""`ShardLoader`: a DataLoader that gives this worker its part of every block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fleetlight.data.sources import MapSource, Share, StreamSource, source_of
from fleetlight.errors import CheckpointError, ConfigError


class BatchShare(NamedTuple):
    """What is told of each batch before it is handed out."""

    #: how many of its samples count, and how many do on all workers
    mine: int
    total: int
    #: the position behind it
    epoch: int
    consumed: int


#: answers what it was told before; None: no batch is in hand
OnShare = Callable[["BatchShare | None"], "BatchShare | None"]


class Announce(Protocol):
    """Whoever wants to know a batch before it is handed out."""

    def wanted(self) -> bool:
        """True when batches are to be loaded one ahead; asked at the begin of an epoch."""

    def __call__(self, batches: Sequence[Any]) -> None:
        """The batch that is handed out now, and the next one unless it is the last."""


class _Loaded(NamedTuple):
    """A batch, how many of its samples count here and in all, and the position behind it."""

    batch: Any
    mine: int
    total: int
    position: dict[str, Any]


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


class ShardLoader(DataLoader[Any]):
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
        on_share: OnShare,
        announce: Announce | None = None,
    ) -> None:
        _refuse_sharded(loader)
        self._share = Share(worker, workers, tail)
        self._seed = seed
        self._on_share = on_share
        self._announce = announce
        self.epoch = 0
        #: samples of the current batch that count; fewer than its size in a filler only
        self.counted = 0
        #: the iteration that hands out batches now; an older one must not
        self._iteration: object = None
        self._source = source_of(loader, self._share)
        #: behind the batch handed out last; the source may be further
        self._position = self._source.position
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
        """Samples (or batches of an own batch sampler) handed out on all workers this epoch."""
        return int(self._position["consumed"])

    @property
    def samples_per_step(self) -> int | None:
        """Samples of all workers in one full step, None where batches differ in size."""
        if isinstance(self._source, (MapSource, StreamSource)) and self.batch_size:
            return self.batch_size * self.workers
        return None

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch at the next iteration. A position just loaded in it stays."""
        if self._iteration is not None or epoch != self.epoch:
            self._enter(epoch)

    def _enter(self, epoch: int) -> None:
        self.epoch, self._iteration = epoch, None
        self._source.position = {}
        self._position = self._source.position

    def __len__(self) -> int:
        return self._source.steps()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._iteration is not None:
            self._enter(self.epoch + 1)
        is_resumed = any(self._position.values())
        # a loop inside another one's, such as a validation, leaves the outer batch its weight
        before = self._on_share(None)
        try:
            is_empty = True
            for batch in self._deal():
                is_empty = False
                yield batch
            if is_empty and is_resumed:
                # saved behind the last batch of a stream, whose length nobody knows
                self._enter(self.epoch + 1)
                yield from self._deal()
        finally:
            self._on_share(before)
        self._enter(self.epoch + 1)

    def _deal(self) -> Iterator[Any]:
        me = self._iteration = object()
        self._source.begin(self.epoch, self._seed)
        for batch, mine, total, position in self._announced(self._loaded()):
            self.counted, self._position = mine, position
            self._on_share(BatchShare(mine, total, self.epoch, self.consumed))
            yield batch
            if self._iteration is not me:
                raise ConfigError(
                    "this loader was started anew while it was being iterated; for two iterations "
                    "at once call fleet.shard twice"
                )

    def _loaded(self) -> Iterator[_Loaded]:
        for dealt in self._source.deal(super().__iter__()):
            yield _Loaded(*dealt, self._source.position)

    def _announced(self, loaded: Iterator[_Loaded]) -> Iterator[_Loaded]:
        """The same; where that is wanted the next one is loaded before each is handed out."""
        announce = self._announce
        if announce is None or not announce.wanted():
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
            announce([now.batch] if coming is None else [now.batch, coming.batch])
            yield now
            if error is not None:
                raise error
            now = coming

    def state_dict(self) -> dict[str, Any]:
        """The position: which epoch, and how far into it all workers together are."""
        return {"epoch": self.epoch, "seed": self._seed, **self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; the next iteration continues its epoch."""
        missing = set(self.state_dict()) - set(state)
        if missing:
            raise CheckpointError(f"a loader's position lacks {sorted(missing)}, got {dict(state)}")
        self._source.position = state
        self._position = self._source.position
        self.epoch, self._seed = int(state["epoch"]), int(state["seed"])
        self._iteration = None
        if self._source.is_at_end():
            # saved after the last batch: the epoch is done
            self._enter(self.epoch + 1)


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
