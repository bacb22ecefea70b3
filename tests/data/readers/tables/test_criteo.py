# SPDX-License-Identifier: Apache-2.0
"""Click logs of Criteo."""

import gzip
import math
import pickle
from pathlib import Path

import pytest
import torch

import fleetlight as fleet
from fleetlight.data import ClickLog, Criteo, FileStream, Record, stable_hash
from fleetlight.errors import DataError

COUNTS = ["3", "-2", "", "0", *["7"] * 9]
CATEGORIES = ["05db9164", "", *[f"{i:08x}" for i in range(24)]]


def line(label: str = "1", counts: list[str] = COUNTS, ids: list[str] = CATEGORIES) -> str:
    return "\t".join([label, *counts, *ids]) + "\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(line() + line("0", ["1"] * 13, [""] * 26))
    return tmp_path


def test_records_are_read(root: Path) -> None:
    data = Criteo(root)
    assert (len(data), data.generated, data.name) == (2, False, "Criteo")
    dense, ids, label = data[0]
    assert dense.tolist() == pytest.approx([math.log(4), -math.log(3), 0, 0, *[math.log(8)] * 9])
    assert (dense.dtype, ids.dtype, label.dtype) == (torch.float32, torch.int64, torch.float32)
    assert ids[0] == stable_hash(["05db9164"], "C1")
    assert ids[25] == stable_hash(["00000017"], "C26")
    assert (label, data[1].label) == (1, 0)


def test_a_missing_category_is_an_id_of_its_column(root: Path) -> None:
    ids = Criteo(root)[1].ids
    assert ids[1] == stable_hash([""], "C2") == Criteo(root)[0].ids[1]
    assert len(ids.unique()) == 26


def test_a_gzip_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "some.tsv.gz"
    path.write_bytes(gzip.compress((line() * 3).encode()))
    assert len(Criteo(path)) == 3


def test_streamed_records_are_equal(root: Path) -> None:
    (batch,) = FileStream(root / "train.txt", Criteo.parse).loader(10)
    assert all(torch.equal(a, b) for a, b in zip(batch, Criteo(root).batch([0, 1]), strict=True))


def test_files_larger_than_memory_have_the_same_batches(root: Path) -> None:
    whole = Criteo(root).batch([0, 1])
    data = fleet.data.criteo(root / "train.txt")
    assert isinstance(data.batch([0, 1]), Record)
    for found in (data.batch([0, 1]), next(iter(pickle.loads(pickle.dumps(data)).loader(2)))):
        for one, same in zip(found, whole, strict=True):
            assert one.dtype == same.dtype
            torch.testing.assert_close(one, same)
    labels = fleet.data.criteo(root / "train.txt", transform=lambda batch: batch.label)
    assert labels.batch([1, 0]).tolist() == [0, 1]
    path = root / "day_0.gz"
    path.write_bytes(gzip.compress(line().encode()))
    with pytest.raises(DataError, match=r"day_0\.gz: got a file compressed with gzip, of which no"):
        fleet.data.criteo(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line()[:-10], "got 39 fields between .*, expected 40: label to C26"),
        (line("2"), "got the label 2, expected 0 or 1"),
        (line(counts=["1", "x", *["0"] * 11]), "got 'x' as I2, expected a number"),
        (line(""), "got '' as label, expected a number"),
    ],
)
def test_a_bad_line_is_named(root: Path, bad: str, message: str) -> None:
    path = root / "train.txt"
    path.write_text(line() + bad.rstrip("\n") + "\n" + line())
    with pytest.raises(DataError, match=rf"{path}, line 2: {message}"):
        Criteo(root)


def test_the_stand_in_is_a_click_log(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.txt or day_0 or part-0.*stand_in=True"):
        Criteo(tmp_path)
    data = Criteo(tmp_path, stand_in=True, seed=2)
    assert data.generated
    assert "stand-in" in data.name
    assert len(data) == 100_000
    assert all(torch.equal(a, b) for a, b in zip(data[0], ClickLog(1, seed=2)[0], strict=True))
