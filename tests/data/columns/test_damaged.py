# SPDX-License-Identifier: Apache-2.0
"""Damaged Arrow files, and files whose statistics or first lines mislead."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fleetlight as fleet
from fleetlight.data import hash_column
from fleetlight.data.columns.conditions import Condition
from fleetlight.errors import ConfigError, DataError


def arrow_file(path: Path, column: Any) -> Path:
    table = pa.table({"x": column})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as to:
        to.write_table(table)
    return path


def damage(path: Path, before: list[int], after: list[int]) -> None:
    """Replace the offsets of a column."""
    old, new = (struct.pack(f"<{len(one)}i", *one) for one in (before, after))
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        (
            [0, 3, 2, 5],
            r"a\.arrow, record batch 0, column 'x': row 1 has a list of negative length",
        ),
        ([0, 2, 3, 500], "its lists are values 0 to 500 of 5; write it again"),
        ([-4, 2, 3, 5], "its lists are values -4 to 5 of 5; write it again"),
    ],
)
def test_lists_that_leave_their_values_are_errors(
    tmp_path: Path, offsets: list[int], text: str
) -> None:
    path = arrow_file(tmp_path / "a.arrow", [[1, 2], [3], [4, 5]])
    damage(path, [0, 2, 3, 5], offsets)
    with pytest.raises(DataError, match=text):
        fleet.data.arrow(path).batch([0])


@pytest.mark.parametrize("offsets", [[0, 2, 3, 1 << 30], [0, 3, 2, 6], [-4, 2, 3, 6]])
def test_texts_that_leave_their_bytes_are_errors(tmp_path: Path, offsets: list[int]) -> None:
    path = arrow_file(tmp_path / "a.arrow", ["ab", "c", "def"])
    damage(path, [0, 2, 3, 6], offsets)
    with pytest.raises(DataError, match=r"a\.arrow, record batch 0, column 'x': row \d has a text"):
        fleet.data.arrow(path).batch([0])


@pytest.mark.parametrize("values", [pa.array([5, None]), pa.array(["five", None])])
def test_missing_values_of_a_dictionary_need_a_fill(tmp_path: Path, values: pa.Array) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1]), values)
    path = arrow_file(tmp_path / "a.arrow", column)
    with pytest.raises(DataError, match="column 'x': 2 values are missing, the first in row 1"):
        fleet.data.arrow(path).batch([0])
    whole = values.fill_null("" if values.type == pa.string() else 0).to_pylist()
    found = fleet.data.arrow(path, fill={"x": whole[1]}).batch([0, 1, 2])["x"].tolist()
    same = hash_column("x", whole).tolist() if isinstance(whole[0], str) else whole
    assert found == [same[0], same[1], same[1]]


def test_conditions_on_nan_are_those_of_each_record(tmp_path: Path) -> None:
    """Statistics leave NaN out."""
    x = np.array([1.0, 2.0, np.nan, 3.0, 3.0, np.nan])
    pq.write_table(pa.table({"n": range(6), "x": x}), tmp_path / "a.parquet", row_group_size=3)
    for where, expected in (
        (("x", "<", 9.0), [0, 1, 3, 4]),
        (("x", "!=", 3.0), [0, 1, 2, 5]),
        (("x", "not in", [3.0]), [0, 1, 2, 5]),
        (("x", "==", 3.0), [3, 4]),
    ):
        data = fleet.data.parquet(tmp_path, ["n"], where=[where])
        assert data.batch(range(len(data)))["n"].tolist() == expected, where


def test_a_value_of_another_type_is_compared_as_arrow_does_also_where_a_group_has_one_value(
    tmp_path: Path,
) -> None:
    """For "in", Arrow reads the text as a number."""
    pq.write_table(pa.table({"day": [19, 20, 20, 20]}), tmp_path / "a.parquet", row_group_size=2)
    assert len(fleet.data.parquet(tmp_path, where=[("day", "in", ["20"])])) == 3
    assert Condition("day", "in", ["20"]).decide({"day": (20, 20, False)}) is None
    pq.write_table(pa.table({"day": [20] * 3}), tmp_path / "a.parquet")
    for operation in ("==", "!=", "<"):
        with pytest.raises(ConfigError, match=r"'day' .* '20' does not fit int64"):
            fleet.data.parquet(tmp_path, where=[("day", operation, "20")])


def test_values_of_a_condition_may_be_an_iterator(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(9)}), tmp_path / "a.parquet", row_group_size=3)
    data = fleet.data.parquet(tmp_path, where=[("n", "in", iter([1, 7]))])
    assert data.batch(range(len(data)))["n"].tolist() == [1, 7]


def test_times_of_another_unit_are_another_type(tmp_path: Path) -> None:
    for name, type_ in (("a", pa.timestamp("ms")), ("b", pa.timestamp("us", "UTC"))):
        pq.write_table(pa.table({"at": pa.array([5], type_)}), tmp_path / f"{name}.parquet")
    with pytest.raises(
        DataError,
        match=r"b\.parquet, column 'at': got whole numbers of timestamp\[us\], expected whole "
        r"numbers of timestamp\[ms\] as in .*a\.parquet",
    ):
        fleet.data.parquet(tmp_path)
    assert fleet.data.parquet(tmp_path / "b.parquet").batch([0])["at"].tolist() == [5]


def test_the_first_csv_file_with_records_decides_the_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,x\n")
    (tmp_path / "b.csv").write_text("n,x\n3,0.5\n")
    batch = fleet.data.csv(tmp_path).batch([0])
    assert (batch["n"].tolist(), batch["x"].tolist()) == ([3], [0.5])
    typed = fleet.data.csv(tmp_path, types={"n": "float32"}).batch([0])
    assert str(typed["n"].dtype) == "torch.float32"
    (tmp_path / "b.csv").write_text("n,x\n")
    with pytest.raises(DataError, match="got no records in 2 files"):
        fleet.data.csv(tmp_path)
