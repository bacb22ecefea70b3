# SPDX-License-Identifier: Apache-2.0
"""`fleet.shard`: each worker its own part of the records."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import Tensor
from torch.utils.data import DataLoader

from fleetlight.collective.position import UNKNOWN, Position
from fleetlight.data.loader import ShardLoader
from fleetlight.data.observer import BatchShare, NoObserver
from fleetlight.errors import names_arguments
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.served.prefetch_hints import Announcer, IdsOf
from fleetlight.fleet.served.shard_queue import queue_of
from fleetlight.fleet.training.worker_seeds import make_distinct
from fleetlight.observe.log import logger

if TYPE_CHECKING:
    from fleetlight.fleet.served.replay import Recovery

#: records of such a type are stacked into batches of the same one; torch has no word for others
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
    """The same loader for this worker's part; its batch size is per worker.

    At step i the workers together hold block i (workers x batch size) of the epoch's order.
    The last, short block: `tail="join"` splits it (gradients are weighed by the samples),
    `"drop"` leaves it out, `"pad"` fills it from the beginning.

    With parameter servers (sync or async) the rows of the batch after the one in hand are pulled
    ahead: `lookahead(batch)` answers its `{table name: ids}`; without it they are learned for
    tensors of int64 that come to a table unchanged. `lookahead=False` loads no batch ahead.

    With `deal="queue"` (async, staleness, GeoSGD) workers ask for the records range by range, of
    `range_batches` batches at most: who is faster does more, and an epoch ends for all once every
    record is trained on.
    """
    context = current()
    follower = _follower(context)
    sharded: ShardLoader[Any] = ShardLoader(
        loader,
        worker=context.group.index,
        workers=context.group.size,
        seed=context.strategy.seed,
        tail=tail,
        observer=JobObserver(context, follower, lookahead),
        queue=queue_of(context, deal, range_batches),
    )
    if context.stopping is not None:
        context.stopping.place(sharded, len(context.loaders))
    context.loaders.append(sharded)
    if follower is not None:
        follower.take_up(sharded)
    return sharded


class Follower:
    """Tells what a later life of this worker must know of a loader, by its number."""

    def __init__(self, context: Context, recovery: Recovery) -> None:
        self._context, self._recovery = context, recovery
        self._number = len(context.loaders)

    def take_up(self, loader: ShardLoader[Any]) -> None:
        """Let it begin where an earlier life was."""
        position = self._recovery.position_of(self._number)
        if position is not None:
            # a script asks the loader that it trains on where to begin
            is_trained_on = self._recovery.is_trained_on(self._number)
            loader.go_on(position, must_be_asked=is_trained_on)

    def begins(self) -> None:
        """As in `LoaderObserver`."""
        self._recovery.begins(self._context, self._number)

    def hands_out(self, before: Mapping[str, Any]) -> None:
        """As in `LoaderObserver`."""
        self._recovery.hands_out(self._context, self._number, before)


def _follower(context: Context) -> Follower | None:
    return None if context.recovery is None else Follower(context, context.recovery)


class Weights:
    """Tells the reducers what this worker's next gradients weigh, and where they come from.

    It is told the share of each batch handed out; of None, every worker weighs the same.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.now: BatchShare | None = None
        self._has_warned = False

    def set(self, share: BatchShare | None) -> BatchShare | None:
        """Set the share of the batch handed out now; answers the one before."""
        before, self.now = self.now, share
        if share is None:
            # a loop begins: loading processes get their seeds from this one's random numbers
            make_distinct(self._context)
        if share is not None and not self._context.models:
            self._warn_once()
        for plan in self._context.models:
            plan.weigh(self._weight_of(share), _position_of(share))
        return before

    def _weight_of(self, share: BatchShare | None) -> float:
        if share is None:
            return 1.0
        if self._context.averages:
            return share.mine * self._context.group.size / share.total
        return float(share.mine > 0)

    def _warn_once(self) -> None:
        if not self._has_warned and not self._context.group.alone:
            logger.warning(
                "a sharded loader is read, but no model is registered: without "
                "model = fleet.distributed_model(model) each worker trains its own"
            )
        self._has_warned = True


class JobObserver:
    """What a job does with the batches of one loader."""

    def __init__(
        self, context: Context, follower: Follower | None, lookahead: IdsOf | Literal[False] | None
    ) -> None:
        self._weights, self._follower = _weights(context), follower
        self._announcer = None if lookahead is False else Announcer(context, lookahead)
        self._stopping = context.stopping

    def begins(self) -> None:
        """As in `LoaderObserver`."""
        if self._follower is not None:
            self._follower.begins()

    def shares(self, share: BatchShare | None) -> BatchShare | None:
        """As in `LoaderObserver`."""
        return self._weights.set(share)

    def hands_out(self, before: Mapping[str, Any]) -> None:
        """As in `LoaderObserver`."""
        if self._follower is not None:
            self._follower.hands_out(before)

    def between(self, loader: ShardLoader[Any]) -> None:
        """No step is half made now; whoever reads ahead in a thread cannot say so."""
        is_here = threading.current_thread() is threading.main_thread()
        if self._stopping is not None and is_here:
            self._stopping.between(loader)

    def wants_next(self) -> bool:
        """As in `LoaderObserver`."""
        return self._announcer is not None and self._announcer.wanted()

    def announces(self, batches: Sequence[Any]) -> None:
        """As in `LoaderObserver`."""
        if self._announcer is not None:
            self._announcer(batches)

    def __reduce__(self) -> Any:
        # a loader sent to a loading process takes no part in the job there
        return NoObserver, ()


def _position_of(share: BatchShare | None) -> Position:
    """Where the worker is; nobody knows when a thread reads ahead of the training."""
    if share is None or threading.current_thread() is not threading.main_thread():
        return UNKNOWN
    return Position(share.epoch, share.consumed)


def _weights(context: Context) -> Weights:
    """One for all loaders of a job: the batch handed out last is the one that is trained on."""
    if context.weights is None:
        context.weights = Weights(context)
    return context.weights
