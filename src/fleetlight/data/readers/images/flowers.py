# SPDX-License-Identifier: Apache-2.0
"""Flowers-102: photographs with their labels and splits in MATLAB files, or class folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.readers.images.dataset import ImageDataset, ImageSource
from fleetlight.data.readers.images.folder import decoded_side, photo_transform, read_folder
from fleetlight.data.readers.images.image_files import ImageFiles
from fleetlight.data.readers.images.matlab import read_matlab
from fleetlight.data.readers.images.stand_in import StandIn
from fleetlight.errors import ConfigError, DataError, did_you_mean

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
