# SPDX-License-Identifier: Apache-2.0
"""`Gradients`: the gradients of one optimizer's step on one server, of one worker or of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetlight.kernels import all_finite
from fleetlight.ps.dtypes import flat_array, numpy_dtype
from fleetlight.ps.messages import TablePush
from fleetlight.ps.placement import Block
from fleetlight.ps.plan import Plan
from fleetlight.ps.update import Floats, Ids

Array = NDArray[Any]


@dataclasses.dataclass
class TablePart:
    """Gradients of one table. Ids may repeat; the arrays are the received ones: do not write."""

    ids: Ids
    rows: Floats
    shows: Floats | None = None
    clicks: Floats | None = None


@dataclasses.dataclass
class Gradients:
    """Gradients of one step of one optimizer."""

    #: by number of the table
    tables: dict[int, TablePart]
    #: of each block of the optimizer on this server; None when the push has no dense part
    dense: list[Array] | None
    blocks: list[Block]
    #: numbers of dense parameters that backward did not reach
    absent: frozenset[int] = frozenset()


def described(
    gradients: Gradients | None,
) -> tuple[list[TablePush], bool, list[int], list[Array]]:
    """Message fields and arrays: tables, whether dense is present, absent parameters, arrays."""
    if gradients is None:
        return [], False, [], []
    tables: list[TablePush] = []
    arrays: list[Array] = []
    for number, part in gradients.tables.items():
        counted = part.shows is not None and part.clicks is not None
        tables.append(TablePush(number, counted))
        arrays += [part.ids, part.rows]
        if part.shows is not None and part.clicks is not None:
            arrays += [part.shows, part.clicks]
    dense = gradients.dense is not None
    return tables, dense, sorted(gradients.absent), arrays + (gradients.dense or [])


def mean(parts: Sequence[Gradients]) -> Gradients:
    """Average the gradients of several workers, in worker order."""
    if len(parts) == 1:
        return parts[0]
    # non-finite values reach this point only with on_nonfinite="apply"
    with np.errstate(all="ignore"):
        return _mean(parts)


def _mean(parts: Sequence[Gradients]) -> Gradients:
    numbers = sorted({number for part in parts for number in part.tables})
    tables = {
        number: _joined([p.tables[number] for p in parts if number in p.tables], len(parts))
        for number in numbers
    }
    dense = [part for part in parts if part.dense is not None]
    # a parameter that only some workers used counts as zero for the others
    absent = frozenset.intersection(*(part.absent for part in dense)) if dense else frozenset()
    blocks = parts[0].blocks
    return Gradients(tables, _dense_mean(dense, blocks, len(parts)), blocks, absent)


def scaled(gradients: Gradients, factor: float) -> Gradients:
    """Return the gradients times a factor, in new memory."""
    with np.errstate(all="ignore"):
        tables = {
            number: dataclasses.replace(part, rows=part.rows * np.float32(factor))
            for number, part in gradients.tables.items()
        }
        pairs = _pairs(gradients)
        dense = [_narrow(block, _wide(block, array) * factor) for block, array in pairs]
    return dataclasses.replace(
        gradients, tables=tables, dense=None if gradients.dense is None else dense
    )


def square(arrays: Sequence[Array]) -> float:
    """The sum of the squares of all elements."""
    return sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays)


def dense_square(gradients: Gradients) -> float:
    """The sum of squares of the dense part."""
    return square([_wide(block, array) for block, array in _pairs(gradients)])


def not_finite(gradients: Gradients, plan: Plan) -> str | None:
    """Name the first table or parameter whose gradient has NaN or infinite values."""
    for number, part in gradients.tables.items():
        if not all_finite(part.rows):
            return f"table {plan.tables[number].name!r}"
    for block, array in _pairs(gradients):
        if all_finite(_wide(block, array)):
            continue
        for piece in block.pieces:
            mine = array[piece.offset : piece.offset + piece.size]
            if not all_finite(_wide(block, mine)):
                return f"parameter {plan.dense[piece.parameter].name!r}"
    return None


def refusal(what: str, where: str, on: str = "anywhere") -> str:
    """The error text for a gradient that is not applied."""
    return (
        f"{what} of {where} with NaN or infinite values, expected finite ones; nothing of it was "
        f"applied {on}. Clip the gradients or lower the learning rate, or choose on_nonfinite "
        "'skip' or 'apply' in the strategy"
    )


def _pairs(gradients: Gradients) -> list[tuple[Block, Array]]:
    if gradients.dense is None:
        return []
    return list(zip(gradients.blocks, gradients.dense, strict=True))


def _joined(parts: Sequence[TablePart], divisor: int) -> TablePart:
    """Concatenate the parts; the table sums rows of one id."""
    ids = np.concatenate([part.ids for part in parts])
    rows = np.empty((len(ids), parts[0].rows.shape[1]), np.float32)
    start = 0
    for part in parts:
        np.divide(part.rows, divisor, out=rows[start : start + len(part.ids)])
        start += len(part.ids)
    return TablePart(
        ids, rows, _counts([p.shows for p in parts]), _counts([p.clicks for p in parts])
    )


def _counts(counts: Sequence[Floats | None]) -> Floats | None:
    present = [count for count in counts if count is not None]
    return np.concatenate(present) if len(present) == len(counts) else None


def _dense_mean(
    parts: Sequence[Gradients], blocks: Sequence[Block], divisor: int
) -> list[Array] | None:
    if not parts:
        return None
    means = []
    for number, block in enumerate(blocks):
        arrays = [_wide(block, part.dense[number]) for part in parts if part.dense is not None]
        total = arrays[0] / divisor if len(arrays) == 1 else arrays[0] + arrays[1]
        for array in arrays[2:]:
            total += array
        if len(arrays) > 1:
            total /= divisor
        means.append(_narrow(block, total))
    return means


def _wide(block: Block, array: Array) -> Array:
    """Widen half precision to float32 for arithmetic."""
    if block.dtype == "bfloat16":
        # its bits are the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _narrow(block: Block, array: Array) -> Array:
    """Inverse of `_wide`."""
    if block.dtype == "bfloat16":
        return flat_array(torch.from_numpy(array).to(torch.bfloat16))
    return array.astype(numpy_dtype(block.dtype), copy=False)
