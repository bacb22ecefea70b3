# SPDX-License-Identifier: Apache-2.0
"""What a route is: a way for tensors to be summed over the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.stamp import GradientStamp


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, flat in one buffer."""

    index: int
    buffer: Tensor
    #: whose they are, in order, where they may travel in another form
    parts: tuple[ParameterSlice, ...] = ()
    #: True for values that travel as they are in any case: they are no gradients
    is_exact: bool = False


class Route(Protocol):
    """A way for tensors to be summed over the workers."""

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        """Begin to sum a bucket, in place; give the others this worker's stamp."""

    def finish(self) -> None:
        """Bring everything started to its end, as far as that takes this worker's doing."""

    def stamps(self) -> Mapping[int, GradientStamp]:
        """The stamps of the workers; asked once, when all the sums are there."""

    def close(self) -> None:
        """Let go of what was opened for it."""


class Staged:
    """Brings buckets to a route through main memory, and sums back up."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Tensor]:
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

    def stamps(self) -> Mapping[int, GradientStamp]:
        """As in `Route`."""
        return self._route.stamps()

    def close(self) -> None:
        """As in `Route`."""
        self._route.close()
