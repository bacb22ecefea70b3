# SPDX-License-Identifier: Apache-2.0
"""Decoding of image files."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.readers.images.pictures import write_jpeg

from fleetlight.data.readers.images.image_files import ImageFiles
from fleetlight.errors import ConfigError, DataError


def test_channels_come_first_and_images_in_the_requested_order(tmp_path: Path) -> None:
    paths = [
        write_jpeg(tmp_path / "red.jpg", (255, 0, 0)),
        write_jpeg(tmp_path / "blue.jpg", (0, 0, 255)),
    ]
    pixels = ImageFiles(paths, 32)[[1, 0, 1]]
    assert (pixels.shape, pixels.dtype) == ((3, 3, 32, 32), np.uint8)
    assert pixels.mean((2, 3)).round(-1).tolist() == [[0, 0, 250], [250, 0, 0], [0, 0, 250]]


def test_the_central_square_is_kept(tmp_path: Path) -> None:
    wide = Image.new("RGB", (90, 30))
    wide.paste((255, 255, 255), (30, 0, 60, 30))
    wide.save(tmp_path / "wide.png")
    assert (ImageFiles([tmp_path / "wide.png"], 30)[[0]] == 255).all()


def test_images_are_not_rotated(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8))
    picture.paste((255, 255, 255), (0, 0, 8, 2))
    picture.save(tmp_path / "white_on_top.png")
    pixels = ImageFiles([tmp_path / "white_on_top.png"], 8)[[0]][0]
    assert (pixels[:, :2] == 255).all()
    assert (pixels[:, 2:] == 0).all()


def test_large_photographs_shrink(tmp_path: Path) -> None:
    path = write_jpeg(tmp_path / "large.jpg", (40, 80, 120), size=(1000, 700))
    pixels = ImageFiles([path], 50)[[0]]
    assert pixels.shape == (1, 3, 50, 50)
    assert np.abs(pixels.mean((0, 2, 3)) - [40, 80, 120]).max() < 3


def test_grey_images_get_three_channels(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 100).save(tmp_path / "grey.jpg")
    assert np.abs(ImageFiles([tmp_path / "grey.jpg"], 8)[[0]].astype(int) - 100).max() < 3


def test_a_broken_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = write_jpeg(tmp_path / "cut.jpg", size=(200, 200))
    path.write_bytes(path.read_bytes()[:-300])
    (tmp_path / "text.jpg").write_text("not a picture")
    images = ImageFiles([path, tmp_path / "text.jpg", tmp_path / "gone.jpg"], 8)
    for index, name in enumerate(["cut", "text", "gone"]):
        with pytest.raises(DataError, match=rf"{name}\.jpg: cannot be decoded"):
            images[[index]]


@pytest.mark.parametrize(
    "limit", [1000, 500]
)  # Pillow warns above the limit, and raises above twice the limit
def test_a_decompression_bomb_is_refused(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jpeg(tmp_path / "bomb.jpg", size=(40, 40))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match="exceeds limit"):
        ImageFiles([path], 8)[[0]]


def test_image_files_can_be_pickled(tmp_path: Path) -> None:
    images = ImageFiles([write_jpeg(tmp_path / "a.jpg")], 8)
    assert np.array_equal(pickle.loads(pickle.dumps(images))[[0]], images[[0]])


def test_a_missing_pillow_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"pip install 'fleetlight\[images\]'"):
        ImageFiles([], 8)
