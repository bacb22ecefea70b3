# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 from its binary version, or from class folders of JPEG files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.readers.files import contents
from fleetlight.data.readers.images.dataset import ImageDataset, ImageSource
from fleetlight.data.readers.images.folder import read_folder
from fleetlight.data.readers.images.stand_in import StandIn
from fleetlight.data.readers.images.transform import ImageTransform
from fleetlight.errors import DataError

_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_FOLDERS = (".", "cifar-10-batches-bin")
#: one byte of label, then the red, the green and the blue plane
_RECORD_BYTES = 1 + 3 * 32 * 32
_STAND_IN = StandIn("CIFAR-10", (3, 32, 32), _CLASSES, {"train": 50_000, "test": 10_000})
#: of the red, green and blue values (0..1) of the training images
_MEAN_STD = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


class CIFAR10(ImageDataset):
    """Small colour photographs `[3, 32, 32]` in 0..1, labels 0..9.

    Reads `data_batch_*.bin` (`test_batch.bin` for `train=False`) in `root` or
    `root/cifar-10-batches-bin`; else JPEG files in `root/train/<class>/` (`root/test/<class>/`).

    Args:
        root: the folder.
        train: False for the test set.
        augment: a random crop of 32 out of 40 (4 black pixels around), and a random flip.
        resize: the side of the images, if not 32.
        normalise: subtracts the mean of each colour and divides by its deviation.
        stand_in: True generates images where the files are absent.
        seed: the seed of generated images.

    Raises:
        DataError: the files are absent or damaged.

    Example:
        >>> image, label = fleet.data.CIFAR10("absent", train=False, stand_in=True)[0]
        >>> image.shape
        torch.Size([3, 32, 32])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        *,
        augment: bool = False,
        resize: int | None = None,
        normalise: bool = False,
        stand_in: bool = False,
        seed: int = 0,
    ) -> None:
        """`augment`: a random crop of 32 out of 40 (4 black pixels around), and a random flip."""
        split = "train" if train else "test"
        source = _read_binary(Path(root), split) or read_folder(Path(root) / split, 32, _CLASSES)
        if source is None:
            looked_for = [f"cifar-10-batches-bin/{_pattern(split)}", f"{split}/airplane/*.jpg"]
            source = _STAND_IN.for_absent(Path(root), looked_for, split, stand_in, seed)
        transform = ImageTransform(
            crop=32 if augment else None,
            padding=4 if augment else 0,
            augment=augment,
            resize=resize,
            normalise=_MEAN_STD if normalise else None,
        )
        super().__init__(f"CIFAR-10 {split}", source, transform)


def read_records(path: Path) -> NDArray[np.uint8]:
    """The records of one binary file, `[count, 3073]`."""
    raw = contents(path)
    count, rest = divmod(len(raw), _RECORD_BYTES)
    if rest or not count:
        raise DataError(
            f"{path}: ends at offset {len(raw)}, {rest} bytes into record {count}; "
            f"expected records of {_RECORD_BYTES} bytes; get the file again"
        )
    records = np.frombuffer(raw, np.uint8).reshape(count, _RECORD_BYTES)
    if records[:, 0].max() > 9:
        first = int((records[:, 0] > 9).argmax())
        raise DataError(
            f"{path}: got the label {records[first, 0]} at offset {first * _RECORD_BYTES}, "
            "expected 0 to 9"
        )
    return records


def _pattern(split: str) -> str:
    return "data_batch_*.bin" if split == "train" else "test_batch.bin"


def _read_binary(root: Path, split: str) -> ImageSource | None:
    for folder in (root / name for name in _FOLDERS):
        if paths := sorted(folder.glob(_pattern(split)), key=_number):
            if split == "train":
                _check_gap(paths)
            records = np.concatenate([read_records(path) for path in paths])
            images = records[:, 1:].reshape(-1, 3, 32, 32)
            return ImageSource(images, records[:, 0].astype(np.int64), _CLASSES)
    return None


def _number(path: Path) -> int:
    digits = re.search(r"\d+$", path.stem)
    return int(digits[0]) if digits else 0


def _check_gap(paths: list[Path]) -> None:
    """DataError for a batch file that is missing in the middle."""
    for expected, path in enumerate(paths, start=1):
        if _number(path) != expected:
            raise DataError(f"{path} exists but data_batch_{expected}.bin before it does not")
