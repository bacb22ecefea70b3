# SPDX-License-Identifier: Apache-2.0
"""The types of the arrays of kernels, for the type checker, the reader and numba.

All arrays are contiguous. Inputs may be read-only, such as arrays over received bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetlight.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# only read
Ids: TypeAlias = NDArray[np.int64]
Positions: TypeAlias = NDArray[np.int32]
Bytes: TypeAlias = NDArray[np.uint8]
Codes: TypeAlias = NDArray[np.int8]
Words: TypeAlias = NDArray[np.uint16]
Values: TypeAlias = NDArray[np.float32]  #: one dimension
Grid: TypeAlias = NDArray[np.float32]  #: two dimensions
Doubles: TypeAlias = NDArray[np.float64]
Layout: TypeAlias = NDArray[np.int64]  #: two dimensions

# written
Bools: TypeAlias = NDArray[np.bool_]
Int8s: TypeAlias = NDArray[np.int8]
Uint16s: TypeAlias = NDArray[np.uint16]
Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
Uint32s: TypeAlias = NDArray[np.uint32]
Uint64s: TypeAlias = NDArray[np.uint64]
Floats: TypeAlias = NDArray[np.float32]  #: one dimension
Matrix: TypeAlias = NDArray[np.float32]  #: two dimensions
Choices: TypeAlias = NDArray[np.int32]  #: two dimensions
Int64Matrix: TypeAlias = NDArray[np.int64]  #: two dimensions

#: name: numba's element type, dimensions, whether it is read-only
_ARRAYS = {
    "Ids": ("int64", 1, True),
    "Positions": ("int32", 1, True),
    "Bytes": ("uint8", 1, True),
    "Codes": ("int8", 1, True),
    "Words": ("uint16", 1, True),
    "Values": ("float32", 1, True),
    "Grid": ("float32", 2, True),
    "Doubles": ("float64", 1, True),
    "Layout": ("int64", 2, True),
    "Bools": ("boolean", 1, False),
    "Int8s": ("int8", 1, False),
    "Uint16s": ("uint16", 1, False),
    "Int32s": ("int32", 1, False),
    "Int64s": ("int64", 1, False),
    "Uint32s": ("uint32", 1, False),
    "Uint64s": ("uint64", 1, False),
    "Floats": ("float32", 1, False),
    "Matrix": ("float32", 2, False),
    "Choices": ("int32", 2, False),
    "Int64Matrix": ("int64", 2, False),
}
_SCALARS = {"int": "int64", "float": "float64", "bool": "boolean", "None": "void"}


def numba_type(annotation: str, types: Any) -> Any:
    """The type of `numba.types` for an annotation of a kernel."""
    if annotation in _SCALARS:
        return getattr(types, _SCALARS[annotation])
    element, dimensions, readonly = _ARRAYS[annotation]
    return types.Array(getattr(types, element), dimensions, "C", readonly=readonly)


def as_ids(ids: ArrayLike) -> Ids:
    """Ids as a contiguous int64 vector, converted from any integer type."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" and array.size:
        raise ConfigError(f"ids are {array.dtype}, expected integers: convert them to int64")
    return np.ascontiguousarray(array, np.int64).reshape(-1)


def as_positions(positions: ArrayLike) -> Positions:
    """Positions as a contiguous int32 vector."""
    return np.ascontiguousarray(positions, np.int32).reshape(-1)


def as_grid(values: ArrayLike, columns: int, what: str, rows: int | None = None) -> Grid:
    """Values as a contiguous float32 matrix with `columns` columns, and `rows` rows if given."""
    array = np.ascontiguousarray(values, np.float32)
    if array.ndim != 2 or array.shape[1] != columns or (rows is not None and len(array) != rows):
        wanted = f"[{'any' if rows is None else rows}, {columns}]"
        raise ConfigError(f"{what} have the shape {list(array.shape)}, expected {wanted}")
    return array


def room(out: Matrix | None, shape: Sequence[int]) -> Matrix:
    """Return `out` after checking its shape and type, or a new array if it is None."""
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != tuple(shape) or out.dtype != np.float32 or not out.flags.c_contiguous:
        got = f"{out.dtype}{list(out.shape)}"
        raise ConfigError(f"out is {got}, expected a contiguous float32{list(shape)}")
    return out
