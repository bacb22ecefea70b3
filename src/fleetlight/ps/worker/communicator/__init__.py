# SPDX-License-Identifier: Apache-2.0
"""One communicator for each training mode, all with one interface."""

from __future__ import annotations

from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator.async_ import Async
from fleetlight.ps.worker.communicator.base import Communicator
from fleetlight.ps.worker.communicator.geo import Geo
from fleetlight.ps.worker.communicator.sync import Sync
from fleetlight.ps.worker.local_parameters import LocalParameters

__all__ = ["Communicator", "open_communicator"]


def open_communicator(
    client: Client,
    live: LocalParameters,
    *,
    queue_size: int | None = None,
    max_merge: int = 1,
    cache_rows: int = 4_000_000,
) -> Communicator:
    """The communicator of the plan's mode.

    Without `queue_size`, async sends one push at a time if the servers have dense values.
    """
    if client.plan.steps_together:
        return Sync(client, live)
    if client.plan.pushes_alone:
        return Async(client, live, queue_size=queue_size, max_merge=max_merge)
    return Geo(client, live, cache_rows=cache_rows)
