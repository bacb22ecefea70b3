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
            [decode(path, path, self._side) for path in (self._paths[index] for index in indices)]
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


def decode(file: Path | BinaryIO, where: object, side: int | None = None) -> NDArray[np.uint8]:
    """The pixels of an image, `[height, width, 3]`; `side`: of its central square."""
    from PIL import Image, ImageOps

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
    except (*broken, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: cannot be decoded as an image ({error})") from error
    return np.asarray(square)
