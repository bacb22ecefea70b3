# SPDX-License-Identifier: Apache-2.0
"""`ImageFolder`: one sub-folder per class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fleetlight.data.readers.images.dataset import ImageDataset, ImageSource
from fleetlight.data.readers.images.image_files import ImageFiles
from fleetlight.data.readers.images.transform import Channels, ImageTransform
from fleetlight.errors import DataError

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
#: the usual values for models of photographs
PHOTO_MEAN_STD: tuple[Channels, Channels] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class ImageFolder(ImageDataset):
    """The images of `root/<class>/*.jpg` (or .jpeg, .png) as `[3, size, size]` in 0..1.

    Labels follow the sorted class names; by value when all names are numbers.

    Args:
        root: the folder.
        size: the side of the images.
        augment: a random crop and a random flip.
        normalise: subtracts the mean of each colour and divides by its deviation.

    Raises:
        DataError: there are no class folders, or an image is damaged.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> Path("images/cat").mkdir(parents=True)
        >>> Image.new("RGB", (40, 40)).save("images/cat/1.png")
        >>> image, label = fleet.data.ImageFolder("images", size=28)[0]
        >>> image.shape, label
        (torch.Size([3, 28, 28]), 0)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: int = 224,
        augment: bool = False,
        normalise: bool = False,
    ) -> None:
        source = read_folder(Path(root), decoded_side(size))
        if source is None:
            raise DataError(
                f"{Path(root).absolute()}: no class folders found; expected <class>/<image>.jpg"
            )
        super().__init__(str(root), source, photo_transform(size, augment, normalise))


def decoded_side(size: int) -> int:
    """The side of decoded photographs: 256 for a crop of 224."""
    return round(size * 8 / 7)


def photo_transform(size: int, augment: bool, normalise: bool) -> ImageTransform:
    """The usual transform of photographs: a crop (random and flipped to augment), normalised."""
    return ImageTransform(
        crop=size, augment=augment, normalise=PHOTO_MEAN_STD if normalise else None
    )


def read_folder(
    root: Path, side: int, classes: tuple[str, ...] | None = None
) -> ImageSource | None:
    """The images in `root`, None where it has no folders; `classes` fixes names and order."""
    names = _class_names(root)
    if not names:
        return None
    classes = classes or names
    if unknown := [name for name in names if name not in classes]:
        raise DataError(
            f"{root / unknown[0]}: got a folder for an unknown class, expected {', '.join(classes)}"
        )
    files = [(path, classes.index(name)) for name in names for path in _images(root / name)]
    labels = np.array([label for _, label in files], np.int64)
    return ImageSource(ImageFiles([path for path, _ in files], side), labels, classes)


def _class_names(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        return ()
    names = [p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]
    return tuple(sorted(names, key=int if all(name.isdecimal() for name in names) else str))


def _images(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise DataError(f"{folder}: no images found, expected files ending in .jpg, .jpeg or .png")
    return paths
