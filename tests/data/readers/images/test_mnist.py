# SPDX-License-Identifier: Apache-2.0
"""MNIST, the idx format, CIFAR-10 and Flowers-102."""

import contextlib
import gzip
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.io import savemat
from tests.data.readers.images.pictures import write_jpeg

from fleetlight.data.readers.images.cifar10 import CIFAR10
from fleetlight.data.readers.images.flowers import Flowers102, read_matlab
from fleetlight.data.readers.images.mnist import MNIST, read_idx
from fleetlight.errors import ConfigError, DataError

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


# -- CIFAR-10, as binary files and as image folders -----------------------------------------------


def records(labels: list[int], seed: int = 0) -> np.ndarray:
    out = np.random.default_rng(seed).integers(256, size=(len(labels), 3073), dtype=np.uint8)
    out[:, 0] = labels
    return out


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    records([3, 1, 4]).tofile(tmp_path / "data_batch_1.bin")
    records([1, 5], seed=1).tofile(tmp_path / "data_batch_2.bin")
    records([9]).tofile(tmp_path / "test_batch.bin")
    return tmp_path


def test_samples_of_cifar10_are_read(cifar10: Path) -> None:
    data = CIFAR10(cifar10)
    assert data.labels.tolist() == [3, 1, 4, 1, 5]
    assert (data.generated, data.classes[3]) == (False, "cat")
    image, label = data[3]
    red_green_blue = records([1, 5], seed=1)[0, 1:].reshape(3, 32, 32)
    assert torch.equal(image, torch.from_numpy(red_green_blue).float() / 255)
    assert label == 1


def test_the_test_split_is_read(cifar10: Path) -> None:
    assert CIFAR10(cifar10, train=False).labels.tolist() == [9]


def test_the_published_folder_and_more_than_nine_batches(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in range(1, 12):
        records([number % 10]).tofile(folder / f"data_batch_{number}.bin")
    assert CIFAR10(tmp_path).labels.tolist() == [*range(1, 10), 0, 1]


def test_a_truncated_file_of_cifar10_is_named(cifar10: Path) -> None:
    path = cifar10 / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin: ends at offset 6145, 3072 bytes into"):
        CIFAR10(cifar10)


def test_an_empty_file_is_named(cifar10: Path) -> None:
    (cifar10 / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test_batch\.bin: ends at offset 0"):
        CIFAR10(cifar10, train=False)


def test_a_label_of_cifar10_out_of_range_is_named(cifar10: Path) -> None:
    records([0, 1, 10]).tofile(cifar10 / "data_batch_1.bin")
    with pytest.raises(DataError, match="got the label 10 at offset 6146, expected 0 to 9"):
        CIFAR10(cifar10)


def test_a_missing_batch_file_is_named(cifar10: Path) -> None:
    (cifar10 / "data_batch_2.bin").rename(cifar10 / "data_batch_3.bin")
    with pytest.raises(DataError, match=r"data_batch_3\.bin exists but data_batch_2\.bin"):
        CIFAR10(cifar10)


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


def test_absent_files_of_cifar10_are_named_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data_batch_\*\.bin or train/airplane.*stand_in=True"):
        CIFAR10(tmp_path)


def test_the_stand_in_has_the_shape_of_cifar10(tmp_path: Path) -> None:
    data = CIFAR10(tmp_path, train=False, stand_in=True)
    assert (data.generated, len(data), data[0][0].shape) == (True, 10_000, (3, 32, 32))


def test_images_are_normalised_and_resized(cifar10: Path) -> None:
    plain, small = CIFAR10(cifar10)[0][0], CIFAR10(cifar10, normalise=True, resize=16)[0][0]
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


# -- Flowers-102 ----------------------------------------------------------------------------------


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    for number in range(1, 7):
        write_jpeg(tmp_path / "jpg" / f"image_{number:05}.jpg", (40 * number, 0, 0), (60, 50))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([102, 7, 7, 1, 50, 2], np.uint8)})
    sets = {"trnid": [4, 1], "valid": [2], "tstid": [3, 5, 6]}
    savemat(tmp_path / "setid.mat", {name: np.array(ids) for name, ids in sets.items()})
    return tmp_path


def test_splits_have_their_labels(flowers: Path) -> None:
    labels = {split: Flowers102(flowers, split).labels.tolist() for split in ("train", "valid")}
    assert labels == {"train": [0, 101], "valid": [6]}
    assert Flowers102(flowers, "test").labels.tolist() == [6, 49, 1]


def test_samples_of_flowers_are_read(flowers: Path) -> None:
    data = Flowers102(flowers, size=28)
    image, label = data[0]
    assert (image.shape, label) == ((3, 28, 28), 0)
    assert abs(image[0].mean().item() - 160 / 255) < 0.02  # image 4, the first of the split
    assert data[1][0].mean() < image.mean()
    assert Flowers102(flowers)[0][0].shape == (3, 224, 224)


def test_an_unknown_split_is_refused(flowers: Path) -> None:
    with pytest.raises(ConfigError, match="no split 'tests'; did you mean 'test'"):
        Flowers102(flowers, "tests")  # type: ignore[arg-type]


@pytest.mark.parametrize("absent", ["imagelabels.mat", "setid.mat"])
def test_a_missing_part_is_an_error_even_with_stand_in(flowers: Path, absent: str) -> None:
    (flowers / absent).unlink()
    with pytest.raises(DataError, match=f"{absent} not found, while other parts exist"):
        Flowers102(flowers, stand_in=True)


def test_missing_photographs_are_named(flowers: Path) -> None:
    (flowers / "jpg" / "image_00005.jpg").unlink()
    (flowers / "jpg" / "image_00006.jpg").unlink()
    assert len(Flowers102(flowers)) == 2
    with pytest.raises(DataError, match=r"image_00005\.jpg and 1 more of 3 are absent"):
        Flowers102(flowers, "test")


@pytest.mark.parametrize("label", [0, 103, 1.5])
def test_a_label_of_flowers_out_of_range_is_named(flowers: Path, label: float) -> None:
    savemat(flowers / "imagelabels.mat", {"labels": np.array([1, 2, label, 4, 5, 6])})
    with pytest.raises(DataError, match=rf"got {label}(\.0)? at labels\[2\], expected 1 to 102"):
        Flowers102(flowers)


def test_an_image_number_out_of_range_is_named(flowers: Path) -> None:
    savemat(flowers / "setid.mat", {"trnid": np.array([7])})
    with pytest.raises(DataError, match=r"got 7 at trnid\[0\], expected 1 to 6"):
        Flowers102(flowers)
    with pytest.raises(DataError, match=r"got the arrays \['trnid'\], expected .*'valid'"):
        Flowers102(flowers, "valid")


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


DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=2, max_dims=3, min_side=0))
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(first=arrays, second=arrays, compress=st.booleans())
def test_files_of_scipy_are_read(
    tmp_path: Path, first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], compress: bool
) -> None:
    path = tmp_path / "x.mat"
    savemat(path, {"a": first, "second_array": second}, do_compression=compress)
    out = read_matlab(path)
    assert list(out) == ["a", "second_array"]
    np.testing.assert_array_equal(out["a"], first)
    np.testing.assert_array_equal(out["second_array"], second)


def test_arrays_that_are_not_numbers_are_skipped(tmp_path: Path) -> None:
    savemat(tmp_path / "x.mat", {"text": "hello", "cells": [{"a": 1}], "n": np.arange(3)})
    assert list(read_matlab(tmp_path / "x.mat")) == ["n"]


def test_logical_arrays_are_numbers(tmp_path: Path) -> None:
    savemat(tmp_path / "x.mat", {"mask": np.array([[True, False]])})
    assert read_matlab(tmp_path / "x.mat")["mask"].tolist() == [[1, 0]]


def test_big_endian_files_are_read(tmp_path: Path) -> None:
    def element(kind: int, payload: bytes) -> bytes:
        return struct.pack(">II", kind, len(payload)) + payload + b"\0" * (-len(payload) % 8)

    matrix = (
        element(6, struct.pack(">II", 6, 0))
        + element(5, struct.pack(">ii", 1, 2))
        + struct.pack(">I4s", 2 << 16 | 1, b"xy")
        + element(9, struct.pack(">dd", 1.5, -2))
    )
    header = b" " * 124 + struct.pack(">H", 0x0100) + b"MI"
    (tmp_path / "x.mat").write_bytes(header + element(14, matrix))
    assert read_matlab(tmp_path / "x.mat")["xy"].tolist() == [[1.5, -2.0]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    savemat(tmp_path / "x.mat", {"labels": np.arange(1000, dtype=np.uint16)}, do_compression=False)
    return tmp_path / "x.mat"


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (100, r"got b'' at offset 126"),
        (132, r"ends at offset 132, inside the tag at offset 128"),
        (500, r"ends at offset 500, expected \d+ bytes of the element at 128"),
    ],
)
def test_a_truncated_matlab_file_is_named(path: Path, keep: int, message: str) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"x\.mat: " + message):
        read_matlab(path)


def test_a_truncated_compressed_element_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.mat"
    savemat(path, {"labels": np.arange(1000)}, do_compression=True)
    raw = bytearray(path.read_bytes()[:-50])
    raw[132:136] = struct.pack("<I", len(raw) - 136)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"x\.mat: .*incomplete or truncated"):
        read_matlab(path)


def test_too_few_values_for_the_shape_are_named(path: Path) -> None:
    raw = path.read_bytes()
    dims = struct.pack("<ii", 1, 1000)
    assert raw.count(dims) == 1
    path.write_bytes(raw.replace(dims, struct.pack("<ii", 2, 1000)))
    with pytest.raises(DataError, match=r"got 1000 values for the array 'labels', expected .*2"):
        read_matlab(path)


def test_other_formats_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "x.mat"
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(512))
    with pytest.raises(DataError, match="-v7"):
        read_matlab(path)
    path.write_bytes(b"hello")
    with pytest.raises(DataError, match="expected the mark IM or MI"):
        read_matlab(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(128, 700), value=st.integers(0, 255))
@example(position=140, value=0)
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    path: Path, position: int, value: int
) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] = value
    damaged = path.with_name("damaged.mat")
    damaged.write_bytes(raw)
    with contextlib.suppress(DataError):
        read_matlab(damaged)
