# SPDX-License-Identifier: Apache-2.0
"""`LoaderObserver`: what a job does while a sharded loader is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class BatchShare(NamedTuple):
    """How much a batch counts, and the position after it."""

    #: samples of the batch that count, and those of the batches of all workers
    mine: int
    total: int
    epoch: int
    consumed: int


class LoaderObserver(Protocol):
    """Called by the thread that reads the loader."""

    def epoch_asked(self) -> None:
        """The script asks for the epoch of the next iteration."""

    def start_iteration(self) -> None:
        """An iteration starts."""

    def set_share(self, share: BatchShare | None) -> BatchShare | None:
        """Set the share of the batch handed out now, None outside a loop; returns the last one."""

    def before_batch(self, position: Mapping[str, Any]) -> None:
        """A batch is about to be handed out; `position` is the one before it."""

    def between_batches(self) -> None:
        """The last batch is done and the next one is not made: training may be interrupted."""

    def batches_ahead(self) -> int:
        """How many batches are to be loaded early; called when an epoch starts."""

    def announce(self, batches: Sequence[Any]) -> None:
        """The batch handed out now, and those after it that are loaded."""


class NoObserver:
    """The observer of a loader outside any job."""

    def epoch_asked(self) -> None:
        """Do nothing."""

    def start_iteration(self) -> None:
        """Do nothing."""

    def set_share(self, share: BatchShare | None) -> BatchShare | None:
        """Do nothing."""
        return None

    def before_batch(self, position: Mapping[str, Any]) -> None:
        """Do nothing."""

    def between_batches(self) -> None:
        """Do nothing."""

    def batches_ahead(self) -> int:
        """Load no batch early."""
        return 0

    def announce(self, batches: Sequence[Any]) -> None:
        """Do nothing."""
