# SPDX-License-Identifier: Apache-2.0
"""Operations between the distinct rows of a run and the results of its lookups.

`places` has the shape of a lookup's ids and the row index of each of them; bag b has the
places bounds[b] to bounds[b + 1]. In main memory kernels compute; on a device torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fleetlight.kernels import gather_bags, gather_visited, spread_bags, sum_visited, weight_grads
from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.staging import is_on_device
from fleetlight.static.ops import device_bags

_library: Any = torch.library.Library("fleetlight", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("gather_rows(Tensor rows, Tensor places, ScalarType dtype) -> Tensor")
_library.define("sum_rows(Tensor[] gradients, Tensor[] places, Tensor rows) -> Tensor")
_library.define(
    "gather_bags(Tensor rows, Tensor places, Tensor bounds, Tensor? each, str mode, "
    "ScalarType dtype) -> (Tensor, Tensor)"
)
_library.define(
    "sum_bags(Tensor gradient, Tensor rows, Tensor places, Tensor bounds, Tensor? each, str mode, "
    "Tensor chosen) -> Tensor"
)
_library.define(
    "weigh_bags(Tensor gradient, Tensor rows, Tensor places, Tensor bounds, Tensor each) -> Tensor"
)

#: one row for each place
GATHER_ROWS = torch.ops.fleetlight.gather_rows.default
#: the gradient of the rows, in float32, from the gradients of gathered rows
SUM_ROWS = torch.ops.fleetlight.sum_rows.default
#: one row for each bag; for maxima also the row index of each element
GATHER_BAGS = torch.ops.fleetlight.gather_bags.default
#: the gradient of the rows, from that of the bags
SUM_BAGS = torch.ops.fleetlight.sum_bags.default
#: the gradient of per-sample weights
WEIGH_BAGS = torch.ops.fleetlight.weigh_bags.default


def _array(tensor: Tensor) -> Any:
    """A float32 array for a kernel."""
    return tensor.to("cpu", torch.float32).contiguous().numpy()


def _flat(places: Tensor) -> Any:
    return places.view(-1).numpy()


# -- rows


def _gather_rows(rows: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    if is_on_device(rows):
        return rows[places.long()].to(dtype)
    out = torch.from_numpy(gather_visited(rows.numpy(), _flat(places)))
    return out.view(*places.shape, rows.shape[1]).to(dtype)


def _gathered(rows: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty([*places.shape, rows.shape[1]], dtype=dtype)


def _sum_rows(gradients: Sequence[Tensor], places: Sequence[Tensor], rows: Tensor) -> Tensor:
    if is_on_device(rows):
        return _sum_rows_there(gradients, places, rows)
    count, dim = rows.shape
    flat = [gradient.reshape(-1, dim) for gradient in gradients]
    together = flat[0] if len(flat) == 1 else torch.cat(flat)
    where = places[0] if len(places) == 1 else torch.cat([p.view(-1) for p in places])
    return torch.from_numpy(sum_visited(_array(together), _flat(where), count))


def _sum_rows_there(gradients: Sequence[Tensor], places: Sequence[Tensor], rows: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    for gradient, where in zip(gradients, places, strict=True):
        flat = gradient.reshape(-1, rows.shape[1]).to(rows.dtype)
        # on a GPU twice as fast as `index_add_`
        out.scatter_add_(0, where.reshape(-1, 1).long().expand_as(flat), flat)
    return out


def _summed(gradients: Sequence[Tensor], places: Sequence[Tensor], rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


# -- bags


def _gather_bags(
    rows: Tensor,
    places: Tensor,
    bounds: Tensor,
    each: Tensor | None,
    mode: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    if is_on_device(rows):
        pooled, rows_of_maxima = device_bags.pooled(rows, places, bounds, each, cast(Mode, mode))
        return pooled.to(dtype), rows_of_maxima
    weights = None if each is None else _array(each)
    out, chosen = gather_bags(
        _array(rows), places.numpy(), bounds.numpy(), weights, cast(Mode, mode)
    )
    made = torch.from_numpy(out).to(dtype)
    return made, places.new_empty(0) if chosen is None else torch.from_numpy(chosen)


def _bagged(
    rows: Tensor,
    places: Tensor,
    bounds: Tensor,
    each: Tensor | None,
    mode: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    shape = [bounds.shape[0] - 1, rows.shape[1]]
    chosen = places.new_empty(shape if mode == "max" else [0])
    return rows.new_empty(shape, dtype=dtype), chosen


def _sum_bags(
    gradient: Tensor,
    rows: Tensor,
    places: Tensor,
    bounds: Tensor,
    each: Tensor | None,
    mode: str,
    chosen: Tensor,
) -> Tensor:
    if is_on_device(rows):
        return device_bags.spread(gradient, rows, places, bounds, each, cast(Mode, mode), chosen)
    summed = spread_bags(
        _array(gradient),
        places.numpy(),
        bounds.numpy(),
        None if each is None else _array(each),
        cast(Mode, mode),
        len(rows),
        chosen.numpy() if mode == "max" else None,
    )
    return torch.from_numpy(summed)


def _summed_bags(
    gradient: Tensor,
    rows: Tensor,
    places: Tensor,
    bounds: Tensor,
    each: Tensor | None,
    mode: str,
    chosen: Tensor,
) -> Tensor:
    return torch.empty_like(rows)


def _weigh_bags(
    gradient: Tensor, rows: Tensor, places: Tensor, bounds: Tensor, each: Tensor
) -> Tensor:
    if is_on_device(rows):
        dots = device_bags.weight_gradients(gradient, rows, places, bounds)
    else:
        dots = torch.from_numpy(
            weight_grads(_array(gradient), _array(rows), places.numpy(), bounds.numpy())
        )
    return dots.to(each.device, each.dtype).view(each.shape)


def _weights(
    gradient: Tensor, rows: Tensor, places: Tensor, bounds: Tensor, each: Tensor
) -> Tensor:
    return each.new_empty(each.shape)


for _name, _made, _function in (
    ("gather_rows", _gathered, _gather_rows),
    ("sum_rows", _summed, _sum_rows),
    ("gather_bags", _bagged, _gather_bags),
    ("sum_bags", _summed_bags, _sum_bags),
    ("weigh_bags", _weights, _weigh_bags),
):
    torch.library.register_fake(f"fleetlight::{_name}", _made, lib=_library)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
