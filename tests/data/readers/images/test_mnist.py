# SPDX-License-Identifier: Apache-2.0
"""MNIST and the idx format."""

import gzip
import logging
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fleetlight.data.readers.images.mnist import MNIST, read_idx
from fleetlight.errors import DataError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(5, 28, 28), dtype=np.uint8)


@pytest.fixture
def root(tmp_path: Path, pixels: np.ndarray) -> Path:
    (tmp_path / IMAGES).write_bytes(idx(pixels))
    (tmp_path / LABELS).write_bytes(idx(np.array([5, 0, 4, 1, 9])))
    return tmp_path


def test_samples_are_read(root: Path, pixels: np.ndarray) -> None:
    data = MNIST(root)
    assert (len(data), data.generated, data.name) == (5, False, "MNIST train")
    image, label = data[4]
    assert image.shape == (1, 28, 28)
    assert torch.equal(image, torch.from_numpy(pixels[4:5]).float() / 255)
    assert label == 9


@pytest.mark.parametrize("folder", [".", "MNIST/raw"])
@pytest.mark.parametrize("names", ["{}-{}-idx{}-ubyte.gz", "{}-{}.idx{}-ubyte"])
def test_all_usual_folders_and_file_names_are_found(
    tmp_path: Path, folder: str, names: str
) -> None:
    pack = gzip.compress if names.endswith(".gz") else bytes
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for part, dims, array in [
        ("images", 3, np.zeros((2, 28, 28))),
        ("labels", 1, np.array([3, 7])),
    ]:
        (tmp_path / folder / names.format("t10k", part, dims)).write_bytes(pack(idx(array)))
    assert MNIST(tmp_path, train=False).labels.tolist() == [3, 7]


def test_absent_files_are_named_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        MNIST(tmp_path / "nowhere")
    for part in (str(tmp_path), "no such folder", IMAGES, LABELS, "stand_in=True"):
        assert part in str(caught.value)


def test_the_stand_in_has_the_real_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fleetlight"):
        train, test = MNIST(tmp_path, stand_in=True), MNIST(tmp_path, train=False, stand_in=True)
    assert ["GENERATED" in message for message in caplog.messages] == [True, True]
    assert (train.generated, len(train), len(test)) == (True, 60_000, 10_000)
    assert "stand-in" in train.name
    assert train[0][0].shape == (1, 28, 28)
    assert not torch.equal(train[0][0], MNIST(tmp_path, stand_in=True, seed=1)[0][0])


def test_real_files_win_over_the_stand_in(root: Path) -> None:
    assert not MNIST(root, stand_in=True).generated


@pytest.mark.parametrize("absent", [IMAGES, LABELS])
def test_one_of_two_files_is_an_error_even_with_stand_in(root: Path, absent: str) -> None:
    (root / absent).unlink()
    with pytest.raises(DataError, match=rf"exists but {absent}\.gz does not"):
        MNIST(root, stand_in=True)


def test_a_wrong_magic_number_is_named(root: Path) -> None:
    (root / LABELS).write_bytes(idx(np.zeros((5, 28, 28))))
    with pytest.raises(DataError, match=rf"{LABELS}: got .*0x00000803 at offset 0, .*0x00000801"):
        MNIST(root)


@pytest.mark.parametrize("cut", [-1, -1000])
def test_a_truncated_file_is_named(root: Path, cut: int) -> None:
    (root / IMAGES).write_bytes((root / IMAGES).read_bytes()[:cut])
    with pytest.raises(DataError, match=rf"ends at offset {3936 + cut}, expected 3936 .*5, 28, 28"):
        MNIST(root)


def test_a_truncated_header_is_named(root: Path) -> None:
    (root / IMAGES).write_bytes((root / IMAGES).read_bytes()[:10])
    with pytest.raises(DataError, match="offset 10, inside its header of 16 bytes"):
        MNIST(root)


def test_a_file_that_is_too_long_is_named(root: Path) -> None:
    with (root / LABELS).open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match="ends at offset 15, expected 13"):
        MNIST(root)


def test_a_wrong_number_of_labels_is_named(root: Path) -> None:
    (root / LABELS).write_bytes(idx(np.array([5, 0, 4])))
    with pytest.raises(DataError, match="got 3 labels for the 5 images"):
        MNIST(root)


def test_a_label_out_of_range_is_named(root: Path) -> None:
    (root / LABELS).write_bytes(idx(np.array([5, 9, 10, 1, 99])))
    with pytest.raises(DataError, match="got the label 10 at offset 10, expected 0 to 9"):
        MNIST(root)


@pytest.mark.parametrize("shape", [(0, 28, 28), (5, 28, 27)])
def test_images_of_another_shape_are_refused(root: Path, shape: tuple[int, ...]) -> None:
    (root / IMAGES).write_bytes(idx(np.zeros(shape)))
    with pytest.raises(DataError, match="expected images of 28 x 28"):
        MNIST(root)


def test_read_idx_keeps_the_order_of_dimensions(tmp_path: Path) -> None:
    array = np.arange(24).reshape(2, 3, 4)
    (tmp_path / "x").write_bytes(idx(array))
    assert np.array_equal(read_idx(tmp_path / "x", 3), array)
