# SPDX-License-Identifier: Apache-2.0
"""The forms in which the rows and gradients of a table cross a connection.

Rows in replies and differences of GeoSGD round to the nearest value; gradients in float16 and int8
round at random, since small gradients would otherwise be lost. The seed is a function of table,
worker and step, so a worker that computes a push again sends the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import (
    from_bfloat16,
    from_int8,
    table_seed,
    to_bfloat16,
    to_float16,
    to_int8,
)
from fleetlight.ps.plan import BF16, FP32, Plan, TablePlan
from fleetlight.ps.update import Floats, TableGradients

Array = NDArray[Any]
#: memory for the next array of a message, of a shape and a dtype; None: the caller allocates it
Output = Callable[[tuple[int, ...], str], Array | None]
#: no memory is given: the codec allocates
_NOWHERE = (None, None)
FP16, INT8 = "fp16", "int8"


@dataclasses.dataclass(frozen=True)
class WireForm:
    """Rows as arrays, and back."""

    #: of each array: its dtype, and whether it has one value for each row
    arrays: tuple[tuple[str, bool], ...]
    #: from rows and the seed of random rounding, None: to the nearest value; into these arrays
    encode: Callable[[Floats, int | None, Sequence[Array | None]], list[Array]]
    decode: Callable[[Sequence[Array]], Floats]

    def shapes(self, count: int, dim: int) -> list[tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each array of `count` rows."""
        return [(dtype, (count,) if each else (count, dim)) for dtype, each in self.arrays]


def no_output(shape: tuple[int, ...], dtype: str) -> None:
    """Let the caller allocate each array."""


def _encode_int8(rows: Floats, seed: int | None, out: Sequence[Array | None]) -> list[Array]:
    words, scales = out
    codes, scales = to_int8(rows, seed, None if words is None else words.view(np.int8), scales)
    # frames have no int8
    return [codes.view(np.uint8), scales]


FORMS = {
    FP32: WireForm(
        (("float32", False),), lambda rows, _seed, _out: [rows], lambda arrays: arrays[0]
    ),
    BF16: WireForm(
        (("uint16", False),),
        lambda rows, _, out: [to_bfloat16(rows, out[0])],
        lambda arrays: from_bfloat16(arrays[0]),
    ),
    FP16: WireForm(
        (("float16", False),),
        lambda rows, seed, out: [to_float16(rows, seed, out[0])],
        lambda arrays: arrays[0].astype(np.float32),
    ),
    INT8: WireForm(
        (("uint8", False), ("float32", True)),
        _encode_int8,
        lambda arrays: from_int8(arrays[0].view(np.int8), arrays[1]),
    ),
}


def form_of(table: TablePlan) -> WireForm:
    """The form of a table's rows and gradients."""
    return FORMS[table.wire]


def encoded(rows: Floats, table: TablePlan) -> list[Array]:
    """Rows or differences as they cross the connection."""
    return form_of(table).encode(rows, None, _NOWHERE)


def encoded_rows(
    read: Callable[[Floats | None], Floats], count: int, table: TablePlan, output: Output
) -> list[Array]:
    """Rows as they cross the connection, in memory of `output`.

    `read` returns `count` rows, in the memory that it gets if any.
    """
    form = form_of(table)
    out = [output(shape, dtype) for dtype, shape in form.shapes(count, table.dim)]
    return form.encode(read(out[0] if table.wire == FP32 else None), None, out)


def as_sent(differences: Floats, table: TablePlan) -> Floats:
    """The differences that arrive; the argument itself if all of them do."""
    return form_of(table).decode(encoded(differences, table))


def encoded_gradients(
    tables: Mapping[int, TableGradients], plan: Plan, worker: int, step: int
) -> dict[int, list[Array]]:
    """By table: the gradients of a push as they cross the connection."""
    found = {}
    for number, part in tables.items():
        table = plan.tables[number]
        seed = None
        if table.wire != FP32:
            seed = table_seed(plan.seed, f"{table.name}:{worker}:{step}")
        found[number] = form_of(table).encode(part.gradients, seed, _NOWHERE)
    return found
