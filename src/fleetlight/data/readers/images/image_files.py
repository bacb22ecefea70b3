# SPDX-License-Identifier: Apache-2.0
"""`ImageFiles`: images on disk, decoded on access. The only file that imports Pillow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ConfigError, DataError


class ImageFiles:
    """The central square of each file, `[3, side, side]`."""

    def __init__(self, paths: Sequence[Path], side: int) -> None:
        check_pillow()
        self._paths = tuple(paths)
        self._side = side

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, indices: list[int], /) -> NDArray[np.uint8]:
        pixels = np.stack(
            [decode(path, self._side) for path in (self._paths[index] for index in indices)]
        )
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def check_pillow() -> None:
    """ConfigError where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "image files are decoded by Pillow, which is not installed; "
            "pip install 'fleetlight[images]'"
        ) from error


def decode(path: Path, side: int) -> NDArray[np.uint8]:
    """The pixels of the central square of an image."""
    try:
        return pixels_of(path, side)
    except ValueError as error:
        raise DataError(f"{path}: cannot be decoded as an image ({error})") from error


def pixels_of(file: Path | BinaryIO, side: int | None = None) -> NDArray[np.uint8]:
    """The pixels of an image, `[height, width, 3]`; `side`: of its central square.

    A ValueError says why there are none.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    broken = (OSError, SyntaxError, ValueError, Image.DecompressionBombWarning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                if side is None:
                    return np.array(image.convert("RGB"))
                # JPEG can be decoded at 1/2, 1/4, 1/8: much less work for large photographs.
                image.draft("RGB", (side, side))
                square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    except UnidentifiedImageError as error:
        # its own text names the object that has the bytes
        raise ValueError("not an image that Pillow knows") from error
    except (*broken, Image.DecompressionBombError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return np.asarray(square)
