# SPDX-License-Identifier: Apache-2.0
"""Numeric arrays from MATLAB files of version 5 to 7, the format of the Flowers-102 labels.

A file is a header of 128 bytes, then elements: a tag (kind, size) and a payload. A matrix element
contains four elements: flags, dimensions, name, values. A compressed element contains one matrix.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.readers.files import contents
from fleetlight.errors import DataError

_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
#: element kind -> numpy type of its values
_TYPES = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
#: array classes double, single and the eight integers; others are text, cells, structures
_NUMERIC_CLASSES = range(6, 16)


class _Element(NamedTuple):
    kind: int
    payload: bytes
    offset: int


def read_matlab(path: Path) -> dict[str, NDArray[Any]]:
    """The numeric arrays of a file by name, without arrays of other classes."""
    raw = contents(path)
    order = _byte_order(path, raw)
    try:
        matrices = [_matrix(e, order) for e in _elements(raw, order, _HEADER_BYTES)]
    except (DataError, zlib.error) as error:
        raise DataError(f"{path}: {error}; get the file again") from error
    return dict(matrix for matrix in matrices if matrix is not None)


def _byte_order(path: Path, raw: bytes) -> str:
    if raw[:8] == b"\x89HDF\r\n\x1a\n" or raw.startswith(b"MATLAB 7.3"):
        raise DataError(f"{path}: got a MATLAB 7.3 (HDF5) file, expected one saved with -v7")
    order = {b"IM": "<", b"MI": ">"}.get(raw[126:128])
    if order is None:
        raise DataError(
            f"{path}: got {raw[126:128]!r} at offset 126, expected the mark IM or MI of a "
            "MATLAB version 5 file"
        )
    return order


def _elements(data: bytes, order: str, offset: int = 0) -> Iterator[_Element]:
    while offset < len(data):
        if len(data) < offset + 8:
            raise DataError(f"ends at offset {len(data)}, inside the tag at offset {offset}")
        kind, size = struct.unpack_from(f"{order}II", data, offset)
        start = offset + 8
        if kind >> 16:  # a small element: kind and size share one word, up to 4 bytes follow
            kind, size, start = kind & 0xFFFF, kind >> 16, offset + 4
        if len(data) < start + size:
            raise DataError(
                f"ends at offset {len(data)}, expected {size} bytes of the element at {offset}"
            )
        yield _Element(kind, data[start : start + size], offset)
        # Elements start at multiples of 8, but a compressed one is not padded.
        offset = start + size if kind == _COMPRESSED else start + size + -(start + size) % 8


def _matrix(element: _Element, order: str) -> tuple[str, NDArray[Any]] | None:
    if element.kind == _COMPRESSED:
        inner = list(_elements(zlib.decompress(element.payload), order))
        return _matrix(inner[0], order) if inner else None
    if element.kind != _MATRIX:
        raise DataError(f"got an element of kind {element.kind} at offset {element.offset}")
    parts = list(_elements(element.payload, order))
    if len(parts) < 4 or _class_of(parts[0], order) not in _NUMERIC_CLASSES:
        return None
    shape = tuple(int(n) for n in _values(parts[1], order))
    values = _values(parts[3], order)
    name = parts[2].payload.decode("latin-1")
    if values.size != np.prod(shape, dtype=object):
        raise DataError(f"got {values.size} values for the array {name!r}, expected shape {shape}")
    return name, values.reshape(shape, order="F")


def _class_of(flags: _Element, order: str) -> int:
    values = _values(flags, order)
    if not values.size:
        raise DataError(f"got no flags of the array at offset {flags.offset}, expected two")
    return int(values[0]) & 0xFF


def _values(element: _Element, order: str) -> NDArray[Any]:
    code = _TYPES.get(element.kind)
    if code is None or len(element.payload) % np.dtype(code).itemsize:
        raise DataError(
            f"got {len(element.payload)} bytes of kind {element.kind} where numbers were expected"
        )
    return np.frombuffer(element.payload, order + code)
