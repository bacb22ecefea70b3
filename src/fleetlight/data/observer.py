# SPDX-License-Identifier: Apache-2.0
"""`LoaderObserver`: what a sharded loader tells the job that trains on its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from fleetlight.data.loader import ShardLoader


class BatchShare(NamedTuple):
    """What is told of each batch before it is handed out."""

    #: how many of its samples count, and how many do on all workers
    mine: int
    total: int
    #: the position after it
    epoch: int
    consumed: int


class LoaderObserver(Protocol):
    """Called by the thread that reads the loader."""

    def begins(self) -> None:
        """An iteration begins."""

    def shares(self, share: BatchShare | None) -> BatchShare | None:
        """A batch is handed out; None: none is in hand. Returns what was told before."""

    def hands_out(self, before: Mapping[str, Any]) -> None:
        """A batch is about to be handed out, and that was the position before it."""

    def between(self, loader: ShardLoader[Any]) -> None:
        """Between two batches, before the next one is made: training may be interrupted."""

    def wants_next(self) -> bool:
        """True when batches are to be loaded one ahead; asked when an epoch begins."""

    def announces(self, batches: Sequence[Any]) -> None:
        """The batch that is handed out now, and the next one unless it is the last."""


class NoObserver:
    """A loader outside any job tells nothing."""

    def begins(self) -> None:
        """As in `LoaderObserver`."""

    def shares(self, share: BatchShare | None) -> BatchShare | None:
        """As in `LoaderObserver`."""
        return None

    def hands_out(self, before: Mapping[str, Any]) -> None:
        """As in `LoaderObserver`."""

    def between(self, loader: ShardLoader[Any]) -> None:
        """As in `LoaderObserver`."""

    def wants_next(self) -> bool:
        """As in `LoaderObserver`."""
        return False

    def announces(self, batches: Sequence[Any]) -> None:
        """As in `LoaderObserver`."""
