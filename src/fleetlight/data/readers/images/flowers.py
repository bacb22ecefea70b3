# SPDX-License-Identifier: Apache-2.0
"""Flowers-102: photographs with their labels and splits in MATLAB files, or class folders."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.readers.files import contents
from fleetlight.data.readers.images.dataset import ImageDataset, ImageSource
from fleetlight.data.readers.images.folder import decoded_side, photo_transform, read_folder
from fleetlight.data.readers.images.image_files import ImageFiles
from fleetlight.data.readers.images.stand_in import StandIn
from fleetlight.errors import ConfigError, DataError, did_you_mean

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


#: split -> its array of image numbers in setid.mat
_SETS = {"train": "trnid", "valid": "valid", "test": "tstid"}
_COUNTS = {"train": 1020, "valid": 1020, "test": 6149}
_CLASSES = tuple(str(number) for number in range(1, 103))
_TABLES = ("imagelabels.mat", "setid.mat")


class Flowers102(ImageDataset):
    """Photographs of flowers `[3, size, size]` in 0..1, labels 0..101.

    Reads `imagelabels.mat`, `setid.mat` and `jpg/image_00001.jpg`... in `root`; else image files
    in `root/<split>/<class 1..102>/`.

    Args:
        root: the folder.
        split: `"train"`, `"valid"` or `"test"`.
        size: the side of the images.
        augment: a random crop of the decoded square (256 for 224) and a random flip.
        normalise: subtracts the mean of each colour and divides by its deviation.
        stand_in: True generates images where the files are absent.
        seed: the seed of generated images.

    Raises:
        ConfigError: there is no such split.
        DataError: the files are absent or damaged.

    Example:
        >>> flowers = fleet.data.Flowers102("absent", size=28, stand_in=True)
        >>> flowers[0][0].shape
        torch.Size([3, 28, 28])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: Literal["train", "valid", "test"] = "train",
        *,
        size: int = 224,
        augment: bool = False,
        normalise: bool = False,
        stand_in: bool = False,
        seed: int = 0,
    ) -> None:
        """`augment`: a random crop of the decoded square (256 for 224) and a random flip."""
        if split not in _SETS:
            raise ConfigError(f"Flowers-102 has no split {split!r}; {did_you_mean(split, _SETS)}")
        side = decoded_side(size)
        folder = Path(root) / split
        source = _read_tables(Path(root), split, side) or read_folder(folder, side, _CLASSES)
        if source is None:
            looked_for = [f"{', '.join(_TABLES)} and jpg/", f"{split}/1/*.jpg"]
            generated = StandIn("Flowers-102", (3, side, side), _CLASSES, _COUNTS)
            source = generated.for_absent(Path(root), looked_for, split, stand_in, seed)
        transform = photo_transform(size, augment, normalise)
        super().__init__(f"Flowers-102 {split}", source, transform)


def _read_tables(root: Path, split: str, side: int) -> ImageSource | None:
    """The published form, None where all of its parts are absent."""
    absent = [name for name in _TABLES if not (root / name).is_file()]
    if not (root / "jpg").is_dir():
        absent.append("jpg")
    if len(absent) == 3:
        return None
    if absent:
        raise DataError(f"{root}: {', '.join(absent)} not found, while other parts exist")
    labels = _array(root / _TABLES[0], "labels", upto=len(_CLASSES))
    numbers = _array(root / _TABLES[1], _SETS[split], upto=len(labels))
    images = ImageFiles(_photographs(root / "jpg", numbers), side)
    return ImageSource(images, labels[numbers - 1] - 1, _CLASSES)


def _array(path: Path, name: str, upto: int) -> NDArray[np.int64]:
    """A list of numbers 1..upto from a MATLAB file."""
    arrays = read_matlab(path)
    if name not in arrays or not arrays[name].size:
        raise DataError(f"{path}: got the arrays {sorted(arrays)}, expected numbers in {name!r}")
    values = arrays[name].ravel()
    wrong = (values < 1) | (values > upto) | (values != np.floor(values))
    if wrong.any():
        raise DataError(
            f"{path}: got {values[wrong][0]} at {name}[{wrong.argmax()}], expected 1 to {upto}"
        )
    return values.astype(np.int64)


def _photographs(folder: Path, numbers: NDArray[np.int64]) -> list[Path]:
    paths = [folder / f"image_{number:05}.jpg" for number in numbers]
    present = {path.name for path in folder.iterdir()}
    if absent := [path for path in paths if path.name not in present]:
        raise DataError(f"{absent[0]} and {len(absent) - 1} more of {len(paths)} are absent")
    return paths
