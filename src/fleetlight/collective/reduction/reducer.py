# SPDX-License-Identifier: Apache-2.0
"""`Reducer`: sums every gradient of every mode over the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.routes.process_groups import ProcessGroups
from fleetlight.collective.routes.route import Bucket, Route, Staged
from fleetlight.collective.stamp import BLANK, GradientStamp


class Reducer:
    """Takes the mean of buckets over the workers, in place, in the order they are given.

    The mean of equal values is that value. So gradients that were reduced before may be reduced
    again, together with what has been added to them since.
    """

    def __init__(
        self,
        size: int,
        groups: Sequence[dist.ProcessGroup],
        *,
        route: Route | None = None,
        narrow: torch.dtype | None = None,
        synchronous: bool = False,
    ) -> None:
        """`route` replaces the process groups for plain tensors.

        `narrow` is the type of values in the process groups.
        """
        self._scale = 1.0 / size
        #: the weight of this worker's current batch: usually 1; 0 where it does not count
        self.weight = 1.0
        #: what this worker sends beside its gradients
        self.stamp = BLANK
        self._groups = ProcessGroups(groups, narrow)
        self._route: Route = route or self._groups
        self._staged = Staged(self._route)
        self._synchronous = synchronous
        #: errors of reductions that have ended, oldest first
        self.failures: list[RuntimeError] = []

    def __deepcopy__(self, memo: object) -> Reducer:
        # a copied module stays with the group of the original
        return self

    def reduce(self, bucket: Bucket) -> Future[Tensor]:
        """Start the reduction of one bucket; the future holds its buffer, reduced."""
        bucket.buffer.mul_(self._scale)
        started = self._route_for(bucket).start(bucket, self.stamp)
        future = cast("Future[Tensor]", started.then(_finishing(bucket.buffer, self.failures)))
        if self._synchronous:
            self.finish()
            future.wait()
        return future

    def _route_for(self, bucket: Bucket) -> Route:
        """Process groups take all tensors, other routes plain ones in main memory.

        Buckets that may travel coded are worth the way through main memory.
        """
        if bucket.buffer.is_sparse or bucket.buffer.is_complex():
            return self._groups
        if in_main_memory(bucket.buffer):
            return self._route
        return self._staged if bucket.parts else self._groups

    def finish(self) -> None:
        """Finish the route; call it before waiting for futures. Failures go to `failures`."""
        try:
            self._route.finish()
        except RuntimeError as error:
            self.failures.append(error)

    def settle(self, started: Iterable[Future[Tensor]]) -> None:
        """Wait for reductions, and raise the first failure."""
        self.finish()
        for reduction in started:
            reduction.wait()
        if self.failures:
            failure = self.failures[0]
            self.failures.clear()
            raise failure

    def stamps(self) -> Mapping[int, GradientStamp]:
        """The stamps of the workers, after all reductions have finished."""
        return self._route.stamps()

    def close(self) -> None:
        """Release the route."""
        self._route.close()


def in_main_memory(tensor: Tensor) -> bool:
    """True where routes other than process groups can take a tensor."""
    return tensor.device.type == "cpu"


def _finishing(buffer: Tensor, failures: list[RuntimeError]) -> Callable[[Future[Any]], Tensor]:
    """The callback of a finished bucket, which any thread may run.

    That thread may be the last to release this function. So it must not hold the process groups:
    one that is freed on its own thread ends the process.
    """

    def finish(done: Future[Any]) -> Tensor:
        try:
            done.value()
        except RuntimeError as error:
            # torch would turn the error of a future into the text of another error
            failures.append(error)
        return buffer

    return finish
