# SPDX-License-Identifier: Apache-2.0
"""The route through torch's process groups of all workers, and stamps as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.codecs.codec import narrowed
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import PACKED_BYTES, GradientStamp


class ProcessGroups:
    """Sums through torch's process groups, which take turns at the buckets."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], narrow: torch.dtype | None = None
    ) -> None:
        """`narrow` is the type to which wider values are cast."""
        self._groups = groups
        self._narrow = narrow
        self._stamps: Tensor | None = None

    def start(self, bucket: Bucket, stamp: GradientStamp) -> Future[Any]:
        """Pass the bucket to a process group, which has its own thread."""
        sent = narrowed(bucket.buffer, None if bucket.is_exact else self._narrow)
        future = self._start(bucket.index, sent, stamp)
        if sent is bucket.buffer:
            return future
        return future.then(_widening(sent, bucket.buffer))

    def _start(self, index: int, tensor: Tensor, stamp: GradientStamp) -> Future[Any]:
        """Start an all-reduce; the first carries stamps, except on GPUs, where a read waits."""
        group = self._groups[index % len(self._groups)]
        if tensor.is_sparse or tensor.is_complex():
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
        elif self._stamps is None and tensor.device.type == "cpu":
            self._stamps = packed_stamps(stamp, group.rank(), group.size(), tensor.dtype)
            work = group.allreduce_coalesced([tensor, self._stamps])
        else:
            # without the checks of dist.all_reduce, which cost as much as the call
            work = group.allreduce([tensor])
        return cast("Future[Any]", work.get_future())

    def finish(self) -> None:
        """Nothing to do: the threads of the process groups finish."""

    def stamps(self) -> Mapping[int, GradientStamp]:
        """The stamps of the first all-reduce."""
        stamps, self._stamps = self._stamps, None
        return {} if stamps is None else unpacked_stamps(stamps)

    def close(self) -> None:
        """Nothing to do: the process groups belong to `Group`."""


def _widening(sent: Tensor, buffer: Tensor) -> Callable[[Future[Any]], Tensor]:
    """The callback that copies narrow sums back into the buffer."""

    def widen(done: Future[Any]) -> Tensor:
        done.value()  # raises the failure
        return buffer.copy_(sent)

    return widen


def packed_stamps(stamp: GradientStamp, index: int, size: int, dtype: torch.dtype) -> Tensor:
    """A row for each worker, zeros except its own one.

    The sum over the workers has all rows, exactly: each narrow type represents the values of a
    byte.
    """
    stamps = torch.zeros(size, PACKED_BYTES, dtype=dtype)
    stamps[index] = torch.tensor(list(stamp.packed()), dtype=dtype)
    return stamps


def unpacked_stamps(stamps: Tensor) -> dict[int, GradientStamp]:
    """The stamp of each worker, from the sum over the workers."""
    rows = stamps.to(torch.uint8).tolist()
    return {index: GradientStamp.unpacked(bytes(row)) for index, row in enumerate(rows)}
