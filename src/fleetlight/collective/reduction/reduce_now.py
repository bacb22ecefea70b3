# SPDX-License-Identifier: Apache-2.0
"""Reduces existing tensors in one call, outside backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from torch import Tensor
from torch.futures import Future

from fleetlight.collective.buckets import BucketLimits, ParameterSlice, assign, flat_of, spread
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket

T = TypeVar("T")

#: the prefix of the name of a parameter's movement
MOVED = "moved/"

#: waits for reductions and checks their results
Settle = Callable[[Sequence["Future[Tensor]"]], None]


def reduce_now(
    reducer: Reducer,
    named: Mapping[str, Tensor],
    settle: Settle,
    *,
    limits: BucketLimits,
    parameters: Mapping[str, Tensor],
    coded: Collection[str] = (),
) -> int:
    """Replace tensors by their means over the workers; returns the number of buckets.

    A tensor with the name of one of the `parameters`, or `moved/` and that name, has the memory
    order of the parameter in its bucket, and may travel coded if that may. Others travel exactly.
    """
    names, tensors = [name.removeprefix(MOVED) for name in named], list(named.values())
    forms = [(name in coded, name not in parameters) for name in names]
    kinds = [(t.dtype, t.device, *form) for t, form in zip(tensors, forms, strict=True)]
    like = [parameters.get(name, t) for name, t in zip(names, tensors, strict=True)]
    parts = [ParameterSlice(name, tensor.numel()) for name, tensor in named.items()]
    buckets = assign([t.numel() * t.element_size() for t in tensors], kinds, limits)
    flats, started = [], []
    for index, members in enumerate(buckets):
        flats.append(flat_of(_of(members, tensors), _of(members, like)))
        is_coded, is_exact = forms[members[0]]
        slices = tuple(_of(members, parts)) if is_coded else ()
        started.append(reducer.reduce(Bucket(index, flats[index], slices, is_exact)))
    settle(started)
    for flat, members in zip(flats, buckets, strict=True):
        spread(flat, _of(members, tensors), _of(members, like))
    return len(buckets)


def _of(members: Sequence[int], all_: Sequence[T]) -> list[T]:
    return [all_[index] for index in members]
