# SPDX-License-Identifier: Apache-2.0
"""The Adult census."""

import math
from pathlib import Path

import pytest

from fleetlight.data import Adult, hash_column
from fleetlight.errors import DataError

RICH = (
    "50, Private, 83311, Bachelors, 13, Married, Exec, Husband, White, Male, 100, 0, 13, "
    "United-States, >50K"
)
POOR = "38,?,215646,HS-grad,9,Divorced,Cleaners,Not-in-family,Black,Female,0,0,40,?,<=50K"
HEADER = "age, workclass, fnlwgt, education, Salary"


def test_records_are_read(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_text(f"{HEADER}\n{RICH}\n{POOR}\n\n")
    data = Adult(tmp_path)
    assert (len(data), data.name) == (2, "Adult train")
    dense, ids, label = data[0]
    logs = [math.log1p(83311) / 15, 13 / 16, math.log1p(100) / 12]
    assert dense.tolist() == pytest.approx([0.5, *logs, 0, 0.13])
    assert ids[0] == hash_column("workclass", ["Private"])
    assert ids[7] == hash_column("native-country", ["United-States"])
    assert (label, data[1].label) == (1, 0)
    assert data[1].ids[0] == hash_column("workclass", ["?"])


def test_the_published_test_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "adult.test").write_text(f"|1x3 Cross validator\n{RICH}.\n{POOR}.\n")
    assert Adult(tmp_path, train=False).columns.label.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (RICH.replace("50,", "old,"), "got 'old' as age, expected a number"),
        (RICH.replace(">50K", "much"), "got the salary 'much', expected <=50K or >50K"),
        (RICH + ", 1", "got 16 fields between ',', expected 15: age to salary"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, message: str) -> None:
    (tmp_path / "adult.csv").write_text(f"{POOR}\n{bad}\n")
    with pytest.raises(DataError, match=rf"adult\.csv, line 2: {message}"):
        Adult(tmp_path)


def test_the_stand_in_has_the_real_shape(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Adult test: .*adult\.test.*stand_in=True"):
        Adult(tmp_path, train=False)
    train, test = Adult(tmp_path, stand_in=True), Adult(tmp_path, train=False, stand_in=True)
    assert (train.generated, len(train), len(test)) == (True, 32_561, 16_281)
    assert (train[0].dense.shape, train[0].ids.shape) == ((6,), (8,))
    assert not train[0].dense.equal(test[0].dense)
