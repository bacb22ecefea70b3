# SPDX-License-Identifier: Apache-2.0
"""One folder per class."""

from pathlib import Path

import pytest
import torch
from tests.data.readers.images.pictures import write_jpeg

from fleetlight.data.readers.images.folder import ImageFolder
from fleetlight.errors import DataError


def test_labels_follow_the_sorted_names(tmp_path: Path) -> None:
    for name in ("wasp/1.jpg", "bee/2.JPG", "bee/1.jpeg"):
        write_jpeg(tmp_path / name, size=(40, 40))
    (tmp_path / "bee" / "notes.txt").touch()
    (tmp_path / ".cache").mkdir()
    data = ImageFolder(tmp_path, size=28)
    assert (data.classes, data.labels.tolist()) == (("bee", "wasp"), [0, 0, 1])
    assert data[0][0].shape == (3, 28, 28)


def test_numbered_classes_sort_by_value(tmp_path: Path) -> None:
    for name in ("10", "9", "100"):
        write_jpeg(tmp_path / name / "a.jpg")
    assert ImageFolder(tmp_path).classes == ("9", "10", "100")


def test_the_crop_is_an_eighth_smaller_than_the_decoded_image(tmp_path: Path) -> None:
    # A black frame of 1/16 around white: a central crop removes it, a random one shows it.
    path = write_jpeg(tmp_path / "a" / "1.jpg", (0, 0, 0), size=(256, 256))
    from PIL import Image

    with Image.open(path) as picture:
        picture.paste((255, 255, 255), (14, 14, 242, 242))
        picture.save(path, quality=100)
    assert ImageFolder(tmp_path)[0][0].min() > 0.9
    torch.manual_seed(0)
    augmented = ImageFolder(tmp_path, augment=True)
    assert min(float(augmented[0][0].min()) for _ in range(5)) < 0.1


def test_normalise_uses_imagenet_statistics(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "a" / "1.jpg", (0, 0, 0))
    image = ImageFolder(tmp_path, size=8, normalise=True)[0][0]
    torch.testing.assert_close(image[0], torch.full((8, 8), -0.485 / 0.229))


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "bee" / "1.jpg")
    (tmp_path / "wasp").mkdir()
    with pytest.raises(DataError, match="wasp: no images found"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("name", [".", "nowhere"])
def test_a_root_without_class_folders_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="no class folders found; expected <class>/<image>"):
        ImageFolder(tmp_path / name)
