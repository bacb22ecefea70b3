# SPDX-License-Identifier: Apache-2.0
"""Bags of a program on a device: torch pools them there, as it does for eager layers.

A program writes its own backward, so these are the operations inside `embedding_bag`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fleetlight.kernels.ids.bags import Mode
from fleetlight.torch_compat.operators import BAGS, BAGS_OF_GRADIENTS, BAGS_OF_WEIGHTS

#: the numbers of torch
_MODES: Mapping[Mode, int] = {"sum": 0, "mean": 1, "max": 2}


def pooled(
    rows: Tensor, places: Tensor, bounds: Tensor, each: Tensor | None, mode: Mode
) -> tuple[Tensor, Tensor]:
    """One row for each bag; for maxima also the row of each value, -1 in an empty bag."""
    bags = bounds.shape[0] - 1
    shape = (bags, rows.shape[1])
    if not len(places):
        return rows.new_zeros(shape), places.new_full(shape if mode == "max" else (0,), -1)
    weights = _flat(each, rows)
    found, _, _, chosen = BAGS(
        rows, places, bounds.to(places.dtype), False, _MODES[mode], False, weights, True
    )
    return found, chosen[:bags] if mode == "max" else places.new_empty(0)


def spread(
    gradient: Tensor,
    rows: Tensor,
    places: Tensor,
    bounds: Tensor,
    each: Tensor | None,
    mode: Mode,
    chosen: Tensor,
) -> Tensor:
    """The gradient of the rows, from that of the bags."""
    if not len(places):
        return torch.zeros_like(rows)
    sizes = bounds.diff().to(places.dtype)
    found: Tensor = BAGS_OF_GRADIENTS(
        gradient.to(rows.dtype).contiguous(),
        places,
        _bag_of_each(places, sizes),
        sizes,
        chosen,
        len(rows),
        False,
        _MODES[mode],
        _flat(each, rows),
    )
    return found


def weight_gradients(gradient: Tensor, rows: Tensor, places: Tensor, bounds: Tensor) -> Tensor:
    """The gradient of the weight of each place, for sums."""
    if not len(places):
        return rows.new_zeros(0)
    starts = bounds.to(places.dtype)
    owners = _bag_of_each(places, starts.diff())
    found: Tensor = BAGS_OF_WEIGHTS(
        gradient.to(rows.dtype).contiguous(), rows, places, starts, owners, _MODES["sum"]
    )
    return found


def _flat(each: Tensor | None, rows: Tensor) -> Tensor | None:
    """Per-sample weights as torch takes them."""
    return None if each is None else each.reshape(-1).to(rows.device, rows.dtype)


def _bag_of_each(places: Tensor, sizes: Tensor) -> Tensor:
    """The bag of each place; the known size spares a wait for the device."""
    bags = torch.arange(len(sizes), dtype=places.dtype, device=places.device)
    return bags.repeat_interleave(sizes, output_size=len(places))
