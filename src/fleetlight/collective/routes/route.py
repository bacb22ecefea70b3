# SPDX-License-Identifier: Apache-2.0
"""`Route`: a way to sum buckets over the workers; and a detour for buckets on a GPU."""

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
    #: their parameters in order, where they may travel coded
    parts: tuple[ParameterSlice, ...] = ()
    #: True for values that are never cast: they are not gradients
    is_exact: bool = False


class Route(Protocol):
    """A way to sum buckets over the workers."""

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        """Start to sum a bucket in place, and send this worker's stamp."""

    def finish(self) -> None:
        """Do this worker's part of all sums that were started."""

    def stamps(self) -> Mapping[int, GradientStamp]:
        """The stamps of the workers; call it once after all sums are complete."""

    def close(self) -> None:
        """Release connections and memory."""


class Staged:
    """Copies buckets of a GPU to main memory for a route there, and sums back."""

    def __init__(self, route: Route) -> None:
        self._route = route

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Tensor]:
        """As in `Route`, with a copy of the bucket."""
        buffer = bucket.buffer
        sent = buffer.to("cpu", copy=True)
        # a future must name the GPU whose tensors it holds
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
