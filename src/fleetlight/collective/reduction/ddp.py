# SPDX-License-Identifier: Apache-2.0
"""torch's C++ gradient reducer, which is inside DistributedDataParallel, used directly.

`torch.distributed.Reducer` hooks each parameter, fills buckets while backward runs and passes each
full one to a callback. Without the Python class around it, the user's module keeps its names, and
each forward saves the work of that class. The reducer is not public: only this file uses it, and
`tests/collective/reduction/test_ddp.py` is its contract.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from fleetlight.collective.buckets import BucketLimits, ParameterSlice, assign
from fleetlight.torch_compat.c10d import (
    GradBucket,
    Logger,
    Reducer,
    check_finalized,
    rebuild_buckets,
    register_comm_hook,
)

OnBucket = Callable[[int, bool, Tensor], "Future[Tensor]"]


class BackwardBuckets:
    """Gradients in buckets; passes each to `on_bucket` as soon as backward has filled it.

    `on_bucket(index, is_last, buffer)` returns a future of the reduced buffer.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        *,
        sparse: set[str],
        limits: BucketLimits,
        group: dist.ProcessGroup,
        find_unused: bool,
        on_bucket: OnBucket,
        coded: Collection[str] = (),
    ) -> None:
        """Gradients of `coded` parameters share no bucket with others."""
        names = [name for name, _ in parameters]
        tensors: list[Tensor] = [parameter for _, parameter in parameters]
        is_sparse = [name in sparse for name in names]
        self._find_unused = find_unused
        # torch regroups by the order of the first backward, without a limit on the count and
        # without codecs; where these matter, the order of definition stands in for that order
        self._may_regroup = not (limits.count or find_unused or coded)
        buckets = self._first_buckets(tensors, is_sparse, [name in coded for name in names], limits)
        #: for each of the first buckets, its slices that may travel coded
        self.coded = [
            tuple(ParameterSlice(names[i], tensors[i].numel()) for i in bucket if names[i] in coded)
            for bucket in buckets
        ]
        self._reducer = Reducer(
            tensors,
            buckets,
            [],
            group,
            is_sparse,
            limits.bytes,
            find_unused,
            True,  # gradients are views into the buckets: nothing is copied back
            dict(enumerate(names)),
            limits.first_bytes,
        )
        #: returns a future of the reduced buffer
        self.on_bucket = on_bucket
        # the reducer logs its errors, and crashes without a logger
        self._logger = Logger(self._reducer)
        self._logger.set_construction_data_and_log("fleetlight", [], -1, False, False, False)
        self._reducer.set_logger(self._logger)
        # weakly: C++ keeps the hook and its state, where the collector finds no cycle
        register_comm_hook(self._reducer, weakref.ref(self), _hand_over)

    def before_forward(self) -> bool:
        """Prepare for a forward whose backward will be reduced; returns True after a regrouping."""
        self._reducer.prepare_for_forward()
        return self._may_regroup and rebuild_buckets(self._reducer)

    def after_forward(self, outputs: list[Tensor]) -> None:
        """Arm the hooks for the backward of these outputs."""
        self._reducer.prepare_for_backward(outputs if self._find_unused else [])

    def unfinished(self) -> bool:
        """True when the last backward left a bucket that a parameter did not fill."""
        try:
            check_finalized(self._reducer)
        except RuntimeError:
            return True
        return False

    @property
    def regroups(self) -> bool:
        """True when the buckets of the first backward are not the final ones."""
        return self._may_regroup

    @staticmethod
    def _first_buckets(
        tensors: Sequence[Tensor],
        is_sparse: Sequence[bool],
        is_coded: Sequence[bool],
        limits: BucketLimits,
    ) -> list[list[int]]:
        """Buckets in reverse order of definition, which is about the order of backward."""
        order = list(reversed(range(len(tensors))))
        sizes = [tensors[i].numel() * tensors[i].element_size() for i in order]
        kinds = [
            # a sparse gradient shares a bucket with no other gradient
            (tensors[i].dtype, tensors[i].device, i if is_sparse[i] else -1, is_coded[i])
            for i in order
        ]
        return [[order[k] for k in bucket] for bucket in assign(sizes, kinds, limits)]


def _hand_over(owner: weakref.ref[BackwardBuckets], bucket: GradBucket) -> Future[Tensor]:
    buckets = owner()
    assert buckets is not None, "a reducer does not outlive its owner"
    return buckets.on_bucket(bucket.index(), bucket.is_last(), bucket.buffer())
