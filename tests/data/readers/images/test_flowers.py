# SPDX-License-Identifier: Apache-2.0
"""Flowers-102."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from tests.data.readers.images.pictures import write_jpeg

from fleetlight.data.readers.images.flowers import Flowers102
from fleetlight.errors import ConfigError, DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(1, 7):
        write_jpeg(tmp_path / "jpg" / f"image_{number:05}.jpg", (40 * number, 0, 0), (60, 50))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([102, 7, 7, 1, 50, 2], np.uint8)})
    sets = {"trnid": [4, 1], "valid": [2], "tstid": [3, 5, 6]}
    savemat(tmp_path / "setid.mat", {name: np.array(ids) for name, ids in sets.items()})
    return tmp_path


def test_splits_have_their_labels(root: Path) -> None:
    labels = {split: Flowers102(root, split).labels.tolist() for split in ("train", "valid")}
    assert labels == {"train": [0, 101], "valid": [6]}
    assert Flowers102(root, "test").labels.tolist() == [6, 49, 1]


def test_samples_are_read(root: Path) -> None:
    data = Flowers102(root, size=28)
    image, label = data[0]
    assert (image.shape, label) == ((3, 28, 28), 0)
    assert abs(image[0].mean().item() - 160 / 255) < 0.02  # image 4, the first of the split
    assert data[1][0].mean() < image.mean()
    assert Flowers102(root)[0][0].shape == (3, 224, 224)


def test_an_unknown_split_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="no split 'tests'; did you mean 'test'"):
        Flowers102(root, "tests")  # type: ignore[arg-type]


@pytest.mark.parametrize("absent", ["imagelabels.mat", "setid.mat"])
def test_a_missing_part_is_an_error_even_with_stand_in(root: Path, absent: str) -> None:
    (root / absent).unlink()
    with pytest.raises(DataError, match=f"{absent} not found, while other parts exist"):
        Flowers102(root, stand_in=True)


def test_missing_photographs_are_named(root: Path) -> None:
    (root / "jpg" / "image_00005.jpg").unlink()
    (root / "jpg" / "image_00006.jpg").unlink()
    assert len(Flowers102(root)) == 2
    with pytest.raises(DataError, match=r"image_00005\.jpg and 1 more of 3 are absent"):
        Flowers102(root, "test")


@pytest.mark.parametrize("label", [0, 103, 1.5])
def test_a_label_out_of_range_is_named(root: Path, label: float) -> None:
    savemat(root / "imagelabels.mat", {"labels": np.array([1, 2, label, 4, 5, 6])})
    with pytest.raises(DataError, match=rf"got {label}(\.0)? at labels\[2\], expected 1 to 102"):
        Flowers102(root)


def test_an_image_number_out_of_range_is_named(root: Path) -> None:
    savemat(root / "setid.mat", {"trnid": np.array([7])})
    with pytest.raises(DataError, match=r"got 7 at trnid\[0\], expected 1 to 6"):
        Flowers102(root)
    with pytest.raises(DataError, match=r"got the arrays \['trnid'\], expected .*'valid'"):
        Flowers102(root, "valid")


def test_class_folders_are_read(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "test" / "102" / "a.jpg")
    write_jpeg(tmp_path / "test" / "9" / "a.jpg")
    data = Flowers102(tmp_path, "test", size=16)
    assert data.labels.tolist() == [8, 101]
    assert data[0][0].shape == (3, 16, 16)


def test_absent_files_are_named_or_replaced_by_a_stand_in(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"imagelabels\.mat, setid\.mat and jpg/.*stand_in=True"):
        Flowers102(tmp_path)
    data = Flowers102(tmp_path, "valid", normalise=True, augment=True, stand_in=True)
    assert (data.generated, len(data), data[5][0].shape) == (True, 1020, (3, 224, 224))
    assert data[0][0].dtype == torch.float32
