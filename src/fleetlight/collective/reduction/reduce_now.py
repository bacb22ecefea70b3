# SPDX-License-Identifier: Apache-2.0
"""Tensors that are there already are reduced all at once: no backward goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from torch import Tensor
from torch.futures import Future

from fleetlight.collective.buckets import BucketLimits, ParameterSlice, assign, flat_of, spread
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket

T = TypeVar("T")

#: before the name of a parameter: how far it has moved
MOVED = "moved/"

#: waits for reductions, and sees that they are what they should be
Settle = Callable[[Sequence["Future[Tensor]"]], None]


def reduce_at_once(
    reducer: Reducer,
    named: Mapping[str, Tensor],
    settle: Settle,
    *,
    limits: BucketLimits,
    parameters: Mapping[str, Tensor],
    coded: Collection[str] = (),
) -> int:
    """Put means over the workers in the place of tensors; answers how many buckets they made.

    A tensor named like one of the `parameters`, or `moved/` and that, lies in its bucket as the
    parameter does, and may travel coded if that may. Others travel as they are.
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
        told = tuple(_of(members, parts)) if is_coded else ()
        started.append(reducer.reduce(Bucket(index, flats[index], told, is_exact)))
    settle(started)
    for flat, members in zip(flats, buckets, strict=True):
        spread(flat, _of(members, tensors), _of(members, like))
    return len(buckets)


def _of(members: Sequence[int], all_: Sequence[T]) -> list[T]:
    return [all_[index] for index in members]
