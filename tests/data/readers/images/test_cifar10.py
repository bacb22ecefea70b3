# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10, as binary files and as image folders."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.readers.images.pictures import write_jpeg

from fleetlight.data.readers.images.cifar10 import CIFAR10
from fleetlight.errors import DataError


def records(labels: list[int], seed: int = 0) -> np.ndarray:
    out = np.random.default_rng(seed).integers(256, size=(len(labels), 3073), dtype=np.uint8)
    out[:, 0] = labels
    return out


@pytest.fixture
def root(tmp_path: Path) -> Path:
    records([3, 1, 4]).tofile(tmp_path / "data_batch_1.bin")
    records([1, 5], seed=1).tofile(tmp_path / "data_batch_2.bin")
    records([9]).tofile(tmp_path / "test_batch.bin")
    return tmp_path


def test_samples_are_read(root: Path) -> None:
    data = CIFAR10(root)
    assert data.labels.tolist() == [3, 1, 4, 1, 5]
    assert (data.generated, data.classes[3]) == (False, "cat")
    image, label = data[3]
    red_green_blue = records([1, 5], seed=1)[0, 1:].reshape(3, 32, 32)
    assert torch.equal(image, torch.from_numpy(red_green_blue).float() / 255)
    assert label == 1


def test_the_test_split_is_read(root: Path) -> None:
    assert CIFAR10(root, train=False).labels.tolist() == [9]


def test_the_published_folder_and_more_than_nine_batches(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in range(1, 12):
        records([number % 10]).tofile(folder / f"data_batch_{number}.bin")
    assert CIFAR10(tmp_path).labels.tolist() == [*range(1, 10), 0, 1]


def test_a_truncated_file_is_named(root: Path) -> None:
    path = root / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin: ends at offset 6145, 3072 bytes into"):
        CIFAR10(root)


def test_an_empty_file_is_named(root: Path) -> None:
    (root / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test_batch\.bin: ends at offset 0"):
        CIFAR10(root, train=False)


def test_a_label_out_of_range_is_named(root: Path) -> None:
    records([0, 1, 10]).tofile(root / "data_batch_1.bin")
    with pytest.raises(DataError, match="got the label 10 at offset 6146, expected 0 to 9"):
        CIFAR10(root)


def test_a_missing_batch_file_is_named(root: Path) -> None:
    (root / "data_batch_2.bin").rename(root / "data_batch_3.bin")
    with pytest.raises(DataError, match=r"data_batch_3\.bin exists but data_batch_2\.bin"):
        CIFAR10(root)


def test_images_in_class_folders_are_read(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "train" / "truck" / "0.jpg", (255, 0, 0))
    write_jpeg(tmp_path / "train" / "cat" / "0.jpg", (0, 0, 255))
    data = CIFAR10(tmp_path)
    assert data.labels.tolist() == [3, 9]  # by class, though only two classes exist
    image = data[1][0]
    assert image.shape == (3, 32, 32)
    torch.testing.assert_close(image.mean((1, 2)), torch.tensor([1.0, 0, 0]), atol=0.02, rtol=0)


def test_an_unknown_class_folder_is_refused(tmp_path: Path) -> None:
    write_jpeg(tmp_path / "test" / "tulip" / "0.jpg")
    with pytest.raises(DataError, match=r"tulip: got a folder for an unknown class.*airplane"):
        CIFAR10(tmp_path, train=False)


def test_absent_files_are_named_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data_batch_\*\.bin or train/airplane.*stand_in=True"):
        CIFAR10(tmp_path)


def test_the_stand_in_has_the_real_shape(tmp_path: Path) -> None:
    data = CIFAR10(tmp_path, train=False, stand_in=True)
    assert (data.generated, len(data), data[0][0].shape) == (True, 10_000, (3, 32, 32))


def test_images_are_normalised_and_resized(root: Path) -> None:
    plain, small = CIFAR10(root)[0][0], CIFAR10(root, normalise=True, resize=16)[0][0]
    assert small.shape == (3, 16, 16)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    expected = (plain.mean((1, 2)) - mean) / std
    torch.testing.assert_close(small.mean((1, 2)), expected, atol=0.05, rtol=0)


def test_augment_moves_by_up_to_4_pixels(tmp_path: Path) -> None:
    white = np.full((200, 3073), 255, np.uint8)
    white[:, 0] = 0
    white.tofile(tmp_path / "data_batch_1.bin")
    torch.manual_seed(0)
    data = CIFAR10(tmp_path, augment=True)
    black_columns = {
        int((image[0].sum(0) == 0).sum()) for image, _ in data.__getitems__([*range(200)])
    }
    assert black_columns == {0, 1, 2, 3, 4}
    assert data[0][0].shape == (3, 32, 32)
