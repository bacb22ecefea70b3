# SPDX-License-Identifier: Apache-2.0
"""A detour through main memory, for buckets on a GPU whose route is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.futures import Future

from fleetlight.collective.position import Stamp
from fleetlight.collective.routes.route import Bucket, Route


class Staged:
    """Brings buckets to a route through main memory, and sums back up."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def start(self, bucket: Bucket, stamp: Stamp) -> Future[Tensor]:
        """As in `Route`; what is sent is a copy."""
        buffer = bucket.buffer
        sent = buffer.to("cpu", copy=True)
        # only a future that knows of a GPU may hold what is there
        back: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)

        def bring_back(done: Future[Any]) -> None:
            back.set_result(buffer.copy_(sent))

        below = dataclasses.replace(bucket, buffer=sent)
        self._route.start(below, stamp).add_done_callback(bring_back)
        return back

    def finish(self) -> None:
        """As in `Route`."""
        self._route.finish()

    def stamps(self) -> Mapping[int, Stamp]:
        """As in `Route`."""
        return self._route.stamps()

    def close(self) -> None:
        """As in `Route`."""
        self._route.close()
