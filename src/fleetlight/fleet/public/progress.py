# SPDX-License-Identifier: Apache-2.0
"""`fleet.progress`: step, loss, samples per second and time to go, on worker 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from fleetlight.data.loader import ShardLoader
from fleetlight.fleet.context import current
from fleetlight.observe.progress import Progress

T = TypeVar("T")


def progress(loader: Iterable[T], total: int | None = None) -> Progress[T]:
    """Wrap a loader; worker 0 shows how far it is. `.show(loss=loss)` adds values."""
    # worker 0 speaks for the whole job
    samples = loader.samples_per_step if isinstance(loader, ShardLoader) else None
    return Progress(loader, total=total, rank0=current().group.index == 0, samples_per_step=samples)
