# SPDX-License-Identifier: Apache-2.0
"""Small JPEG files for tests."""

from pathlib import Path

from PIL import Image

Colour = tuple[int, int, int]


def write_jpeg(path: Path, colour: Colour = (0, 0, 0), size: tuple[int, int] = (32, 32)) -> Path:
    """A picture of one colour; `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, "JPEG", quality=100, subsampling=0)
    return path
