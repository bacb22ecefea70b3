# SPDX-License-Identifier: Apache-2.0
"""MNIST from its idx files, plain or gzipped."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.readers.files import contents, first_file
from fleetlight.data.readers.images.dataset import ImageDataset, ImageSource
from fleetlight.data.readers.images.stand_in import StandIn
from fleetlight.data.readers.images.transform import ImageTransform
from fleetlight.errors import DataError

_CLASSES = tuple("0123456789")
_FOLDERS = (".", "MNIST/raw")
_PREFIX = {"train": "train", "test": "t10k"}
_STAND_IN = StandIn("MNIST", (1, 28, 28), _CLASSES, {"train": 60_000, "test": 10_000})
_UNSIGNED_BYTE = 0x08


class MNIST(ImageDataset):
    """Handwritten digits `[1, 28, 28]` in 0..1, labels 0..9.

    Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (`t10k-...` for `train=False`),
    with or without `.gz`, in `root` or `root/MNIST/raw`.

    Args:
        root: the folder.
        train: False for the test set.
        stand_in: True generates images where the files are absent.
        seed: the seed of generated images.

    Raises:
        DataError: the files are absent or damaged.

    Example:
        >>> image, label = fleet.data.MNIST("absent", train=False, stand_in=True)[0]
        >>> image.shape
        torch.Size([1, 28, 28])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        *,
        stand_in: bool = False,
        seed: int = 0,
    ) -> None:
        split = "train" if train else "test"
        source = _read(Path(root), split)
        if source is None:
            looked_for = [f"{_names(split, 'images')[1]} and {_names(split, 'labels')[1]}"]
            source = _STAND_IN.for_absent(Path(root), looked_for, split, stand_in, seed)
        super().__init__(f"MNIST {split}", source, ImageTransform())


def read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in an idx file of `dims` dimensions."""
    raw = contents(path)
    header = 4 + 4 * dims
    magic = struct.pack(">HBB", 0, _UNSIGNED_BYTE, dims)
    if raw[:4] != magic:
        raise DataError(
            f"{path}: got the magic number 0x{raw[:4].hex()} at offset 0, expected 0x{magic.hex()} "
            f"(idx, unsigned bytes, {dims} dimensions)"
        )
    if len(raw) < header:
        raise DataError(f"{path}: ends at offset {len(raw)}, inside its header of {header} bytes")
    shape = struct.unpack_from(f">{dims}I", raw, 4)
    if len(raw) != header + math.prod(shape):
        raise DataError(
            f"{path}: ends at offset {len(raw)}, expected {header + math.prod(shape)} "
            f"for the shape {shape} its header promises; get the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _names(split: str, what: str) -> list[str]:
    """The possible names of a file; the second is the published one."""
    dims = {"images": 3, "labels": 1}[what]
    stem = f"{_PREFIX[split]}-{what}"
    plain = f"{stem}-idx{dims}-ubyte"
    return [plain, f"{plain}.gz", f"{stem}.idx{dims}-ubyte", f"{stem}.idx{dims}-ubyte.gz"]


def _read(root: Path, split: str) -> ImageSource | None:
    folders = [root / folder for folder in _FOLDERS]
    images = first_file(folders, _names(split, "images"))
    labels = first_file(folders, _names(split, "labels"))
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        absent = _names(split, "images" if images is None else "labels")[1]
        raise DataError(f"{images or labels} exists but {absent} does not; MNIST needs both")
    return ImageSource(*_pair(images, labels), _CLASSES)


def _pair(images_path: Path, labels_path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28) or not len(images):
        raise DataError(
            f"{images_path}: got the shape {images.shape} at offset 4, expected images of 28 x 28"
        )
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: got {len(labels)} labels for the {len(images)} images of {images_path}"
        )
    if labels.max() > 9:
        first = int((labels > 9).argmax())
        raise DataError(
            f"{labels_path}: got the label {labels[first]} at offset {8 + first}, expected 0 to 9"
        )
    return images[:, None], labels.astype(np.int64)
