# SPDX-License-Identifier: Apache-2.0
"""Flowers-102."""

import contextlib
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

from fleetlight.data.readers.images.flowers import Flowers102, read_matlab
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
def test_a_truncated_file_is_named(path: Path, keep: int, message: str) -> None:
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
