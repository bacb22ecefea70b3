# SPDX-License-Identifier: Apache-2.0
"""`parquet`: batches, columns, and one clear error for each damaged or unexpected file."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.data.columns.making import groups_read, numbered, numbers
from tests.errors import refuses
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight.data import hash_column
from fleetlight.data.columns import reading
from fleetlight.data.columns.conditions import Condition
from fleetlight.data.columns.files import text_file
from fleetlight.errors import ConfigError, DataError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(columns: Any, name: str = "a.parquet", group: int = 4) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, path, row_group_size=group)
        return path

    return _write


def batch_of(data: Any, indices: Any = None) -> Any:
    return data.batch(range(len(data)) if indices is None else indices)


def test_columns_have_the_types_of_torch(write: Write) -> None:
    path = write(
        {
            "small": pa.array([1, 2, 3], pa.int8()),
            "half": pa.array(np.array([1, 2, 3], np.float16)),
            "flag": [True, False, True],
            "day": pa.array([1, 2, 3], pa.date32()),
        }
    )
    batch = batch_of(fleet.data.parquet(path))
    assert {name: one.dtype for name, one in batch.items()} == {
        "small": torch.int64,
        "half": torch.float32,
        "flag": torch.int64,
        "day": torch.int64,
    }
    assert [one.tolist() for one in batch.values()] == [[1, 2, 3], [1, 2, 3], [1, 0, 1], [1, 2, 3]]


def test_columns_side_by_side_are_a_matrix(write: Write) -> None:
    path = write({"a": range(9), "b": np.arange(9) * 0.5, "c": range(9, 18), "label": [0.0] * 9})
    data = fleet.data.parquet(path, {"ids": ["c", "a"], "dense": ["a", "b"], "label": "label"})
    batch = batch_of(data, [1, 8, 2])
    assert batch["ids"].tolist() == [[10, 1], [17, 8], [11, 2]]
    assert batch["dense"].tolist() == [[1, 0.5], [8, 4], [2, 1]]
    assert batch["dense"].dtype == torch.float32
    assert list(data[-1]) == ["ids", "dense", "label"]
    assert data[-1]["ids"].tolist() == [17, 8]


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary()])
def test_texts_are_the_ids_of_hash_column(write: Write, is_coded: bool, type_: pa.DataType) -> None:
    texts = ["", "a", "12345678", "123456789", "long " * 9, "Straße", "a"]
    column = pa.array([text.encode() for text in texts], pa.binary()).cast(type_)
    path = write({"word": column.dictionary_encode() if is_coded else column})
    found = batch_of(fleet.data.parquet(path), [6, 5, 4, 3, 2, 1, 0])["word"]
    assert found.tolist() == hash_column("word", texts[::-1]).tolist()


def test_lists_are_values_and_offsets(write: Write) -> None:
    lists = [[1, 2], [], [3], [4, 5, 6], [7], [], [8, 9]]
    path = write({"items": lists, "tags": [[str(n) for n in one] for one in lists]})
    batch = batch_of(fleet.data.parquet(path), [6, 1, 3, 0])
    values, offsets = batch["items"]
    assert values.tolist() == [8, 9, 4, 5, 6, 1, 2]
    assert offsets.tolist() == [0, 2, 2, 5]
    assert batch["tags"].values.tolist() == hash_column("tags", list("8945612")).tolist()
    assert torch.nn.EmbeddingBag(10, 3)(values, offsets).shape == (4, 3)
    in_turn = batch_of(fleet.data.parquet(path), [4, 5, 6])["items"]
    assert (in_turn.values.tolist(), in_turn.offsets.tolist()) == ([7, 8, 9], [0, 1, 1])
    assert fleet.data.parquet(path)[3]["items"].tolist() == [4, 5, 6]


def test_lists_of_fixed_length_are_a_matrix(write: Write) -> None:
    column = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2))
    assert batch_of(fleet.data.parquet(write({"v": column})))["v"].tolist() == [[1, 2], [3, 4]]


def test_missing_values_need_a_fill(write: Write) -> None:
    path = write({"id": [1, 2, 3, 4, 5, None], "list": [[1]] * 4 + [[1, None], None]})
    with refuses(DataError, "a.parquet, row group 1, column 'id': 1 values", "fill={'id': ...}"):
        batch_of(fleet.data.parquet(path, ["id"]))
    filled = fleet.data.parquet(path, fill={"id": 0, "list": []})
    with pytest.raises(DataError, match="column 'list': 1 values are missing"):
        batch_of(filled)
    assert batch_of(fleet.data.parquet(path, ["id"], fill={"id": 0}))["id"].tolist()[-1] == 0
    with pytest.raises(DataError, match="does not fit int64"):
        batch_of(fleet.data.parquet(path, ["id"], fill={"id": "none"}))
    for value in (0.5, [1]):
        with pytest.raises(DataError, match=r"column 'id': fill=.* does not fit int64"):
            batch_of(fleet.data.parquet(path, ["id"], fill={"id": value}))
    with pytest.raises(DataError, match="fill: no column 'ix'; "):
        fleet.data.parquet(path, ["id"], fill={"ix": 0})


def test_fill_may_have_any_type_that_keeps_its_value(write: Write) -> None:
    columns = {"x": pa.array([None], pa.float32()), "day": pa.array([None], pa.date32())}
    columns["n"] = pa.array([None], pa.int8())
    path = write({**columns, "v": pa.array([None], pa.list_(pa.int64(), 2))})
    batch = batch_of(fleet.data.parquet(path, fill={"x": 0.1, "day": 3, "n": 2.0, "v": [1, 2]}))
    assert batch["x"].tolist() == pytest.approx([0.1])
    assert (batch["day"].tolist(), batch["n"].tolist(), batch["v"].tolist()) == ([3], [2], [[1, 2]])
    with pytest.raises(DataError, match=r"fill=\{'v': \[0\.5, 1\]\} does not fit"):
        batch_of(fleet.data.parquet(path, ["v"], fill={"v": [0.5, 1]}))


@pytest.mark.filterwarnings("error")
def test_values_beyond_float32_are_errors(write: Write) -> None:
    path = write({"x": [1.0, np.inf, -1e300, np.nan], "v": [[1.0], [], [1e39], []]})
    for name, value in (("x", r"-1e\+300"), ("v", r"1e\+39")):
        text = rf"a\.parquet, row group 0, column '{name}': got {value}, expected at most 3\.4"
        with pytest.raises(DataError, match=text):
            batch_of(fleet.data.parquet(path, [name]))
        with pytest.raises(DataError, match=text):
            batch_of(fleet.data.parquet(path, {"m": [name]} if name == "x" else [name]))
    batch = batch_of(fleet.data.parquet(write({"x": [np.inf, np.nan]}), fill={"x": 0}))
    # NaN is a value, not a missing one
    assert batch["x"][0] == np.inf
    assert batch["x"].isnan().tolist() == [False, True]


def test_large_whole_numbers_keep_their_bits(write: Write) -> None:
    path = write({"n": pa.array([2**64 - 2, 2**24 + 1], pa.uint64()), "x": [0.5, 0.25]})
    batch = batch_of(fleet.data.parquet(path, {"n": "n", "both": ["n", "x"]}))
    assert batch["n"].tolist() == [-2, 2**24 + 1]
    # beside floats they are float32
    assert batch["both"][1].tolist() == [2**24, 0.25]


def test_missing_list_may_be_an_empty_one(write: Write) -> None:
    path = write({"list": [[1, 2], None, [3]]})
    values, offsets = batch_of(fleet.data.parquet(path, fill={"list": []}))["list"]
    assert (values.tolist(), offsets.tolist()) == ([1, 2, 3], [0, 2, 2])


def test_unknown_column_and_kind_are_errors(write: Write) -> None:
    path = write({"user": [1], "price": pa.array([1], pa.decimal128(5, 2))})
    with pytest.raises(DataError, match="no column 'usr'; did you mean 'user'"):
        fleet.data.parquet(path, ["usr"])
    with pytest.raises(DataError, match=r"column 'price': got decimal128\(5, 2\), expected whole"):
        fleet.data.parquet(path)
    with pytest.raises(ConfigError, match="got a text, expected a list of names"):
        fleet.data.parquet(path, "user")
    with pytest.raises(ConfigError, match="'x' has no columns"):
        fleet.data.parquet(path, {"x": []})


def test_matrix_refuses_lists_and_texts_beside_floats(write: Write) -> None:
    path = write({"a": [1.0], "b": ["x"], "c": [[1]]})
    with pytest.raises(ConfigError, match=r"'m' has texts \(b\).* and floats \(a\)"):
        fleet.data.parquet(path, {"m": ["a", "b"]})
    with pytest.raises(ConfigError, match="column 'c' beside others, but it has lists of whole"):
        fleet.data.parquet(path, {"m": ["a", "c"]})


def test_file_with_another_schema_is_named(write: Write, tmp_path: Path) -> None:
    write({"id": [1], "x": [1.0]}, "a.parquet")
    write({"id": ["1"], "x": [1.0]}, "b.parquet")
    write({"id": [1]}, "c.parquet")
    with pytest.raises(DataError, match=r"b\.parquet, column 'id': got texts, expected whole"):
        fleet.data.parquet(tmp_path, ["id"])
    with pytest.raises(DataError, match=r"c\.parquet: no column 'x'"):
        fleet.data.parquet(tmp_path, ["x"])


def test_files_without_records_are_left_out(write: Write, tmp_path: Path) -> None:
    write({"id": pa.array([], pa.int64())}, "a.parquet")
    with pytest.raises(DataError, match="got no records in 1 files"):
        fleet.data.parquet(tmp_path)
    write({"id": [1, 2]}, "b.parquet")
    assert len(fleet.data.parquet(tmp_path)) == 2


def test_no_file_and_no_parquet_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file in .*expected a file, a pattern"):
        fleet.data.parquet(tmp_path / "day_*")
    with pytest.raises(DataError, match=r"the folder has no file that ends with \.parquet or \.pq"):
        fleet.data.parquet(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet \("):
        fleet.data.parquet(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet \("):
        fleet.data.parquet(tmp_path)


def test_damaged_row_group_is_named(write: Write, tmp_path: Path) -> None:
    path = write({"id": np.random.default_rng(0).integers(0, 2**60, 4000)}, group=2000)
    at = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[at : at + 64] = b"\xff" * 64
    path.write_bytes(data)
    found = fleet.data.parquet(path)
    assert len(found.batch([0, 1])["id"]) == 2
    with pytest.raises(DataError, match=r"a\.parquet, row group 1: cannot be read \(.*write the"):
        found.batch([2000])


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_may_be_changed_in_place(write: Write, shuffle: bool) -> None:
    path = write({"a": range(1, 9), "b": range(1, 9), "c": [[n] for n in range(1, 9)]})
    data = fleet.data.parquet(path, {"one": "a", "two": ["a", "b"], "lists": "c"})
    for _ in range(2):
        for batch in data.loader(2, shuffle=shuffle):
            for one in (batch["one"], batch["two"], batch["lists"].values):
                assert (one > 0).all()
                one.zero_()


def test_changed_file_is_an_error(write: Write) -> None:
    data = fleet.data.parquet(write({"id": range(8)}))
    write({"id": range(9)})
    with pytest.raises(DataError, match=r"a\.parquet: the file has changed since the job began"):
        data.batch([0])


def test_conditions_leave_records_and_whole_groups_out(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetlight.data.columns.files.columnar_file import ParquetFile

    path = write({"n": range(20), "odd": [n % 2 for n in range(20)], "x": [None, 1] * 10})
    for where, expected in (
        ([("n", ">=", 8)], range(8, 20)),
        ([("n", "<", 10)], range(10)),
        ([("n", "==", 7)], [7]),
        ([("n", "!=", 7)], [n for n in range(20) if n != 7]),
        ([("n", "in", [3, 18])], [3, 18]),
        ([("n", "not in", {3, 18})], [n for n in range(20) if n not in (3, 18)]),
        ([("n", ">", 3), ("odd", "==", 1)], range(5, 20, 2)),
        ([("x", "!=", 2)], range(1, 20, 2)),
        ([("x", "not in", [2])], range(1, 20, 2)),
    ):
        data = fleet.data.parquet(path, ["n"], where=where)
        assert batch_of(data)["n"].tolist() == list(expected), where
        assert len(data) == len(list(expected))
    with pytest.raises(DataError, match="no record for which the conditions are true"):
        fleet.data.parquet(path, where=[("n", ">", 99)])
    read: list[int] = []
    plain = ParquetFile.read
    monkeypatch.setattr(
        ParquetFile, "read", lambda self, group, *a: read.append(group) or plain(self, group, *a)
    )
    data = fleet.data.parquet(path, ["odd"], where=[("n", ">=", 9)])
    batch_of(data)
    # groups of 4: one must be looked into to count its records
    assert sorted(read) == [2, 2, 3, 4]


def test_wrong_conditions_are_errors(write: Write) -> None:
    path = write({"n": range(3)})
    for where, error in (
        ([("n", "=", 1)], "got the operation '='"),
        ([("n", "in", "abc")], "got a text, expected a list of values"),
        ([("n", "<")], r"expected a list of \(column, operation, value\)"),
        ([("n", "<", "x")], "'n' < 'x' does not fit int64"),
    ):
        with pytest.raises(ConfigError, match=error):
            fleet.data.parquet(path, where=where)
    with pytest.raises(DataError, match="no column 'm'"):
        fleet.data.parquet(path, where=[("m", "<", 1)])


def test_folders_give_columns(write: Write, tmp_path: Path) -> None:
    for day in (19, 20):
        for kind in ("web", "app"):
            write({"n": [day] * 3}, f"day={day}/kind={kind}/x.parquet")
    batch = batch_of(fleet.data.parquet(tmp_path, ["day", "kind", "n"], where=[("day", ">", 19)]))
    assert batch["day"].tolist() == batch["n"].tolist() == [20] * 6
    assert set(batch["kind"].tolist()) == set(hash_column("kind", ["web", "app"]).tolist())
    assert len(fleet.data.parquet(str(tmp_path / "day=*/kind=app"))) == 6
    assert len(fleet.data.parquet(tmp_path, ["day"])) == 12


def test_names_of_folders_are_read_as_tools_write_them(write: Write, tmp_path: Path) -> None:
    write({"n": [1]}, "city=New%20York/x.parquet")
    write({"n": [2]}, "city=Bonn/x.parquet")
    found = fleet.data.parquet(tmp_path, where=[("city", "==", "New York")])
    assert batch_of(found)["city"].tolist() == hash_column("city", ["New York"]).tolist()


def test_the_folder_of_missing_values_holds_missing_ones(write: Write, tmp_path: Path) -> None:
    write({"n": [1]}, "day=20/x.parquet")
    write({"n": [2]}, "day=__HIVE_DEFAULT_PARTITION__/x.parquet")
    found = batch_of(fleet.data.parquet(tmp_path, fill={"day": 0}))
    assert sorted(zip(found["n"].tolist(), found["day"].tolist(), strict=True)) == [(1, 20), (2, 0)]
    assert batch_of(fleet.data.parquet(tmp_path, where=[("day", "<", 99)]))["day"].tolist() == [20]
    for condition in (("day", "!=", 20), ("day", "not in", [20])):
        with pytest.raises(DataError, match="no record for which the conditions are true"):
            fleet.data.parquet(tmp_path, where=[condition])
    with pytest.raises(DataError, match=r"DEFAULT_PARTITION__/x.parquet.* column 'day'.*missing"):
        batch_of(fleet.data.parquet(tmp_path))


@pytest.mark.parametrize("values", [["--5", "6"], ["9" * 20, "6"], ["__HIVE_DEFAULT_PARTITION__"]])
def test_a_folder_that_is_no_int64_is_a_text(
    write: Write, tmp_path: Path, values: Sequence[str]
) -> None:
    for one in values:
        write({"n": [1]}, f"day={one}/x.parquet")
    texts = sorted("none" if "HIVE" in one else one for one in values)
    found = batch_of(fleet.data.parquet(tmp_path, fill={"day": "none"}))["day"].tolist()
    assert found == hash_column("day", texts).tolist()


def test_a_file_that_two_patterns_name_is_refused(write: Write, tmp_path: Path) -> None:
    for day in (19, 20):
        write({"n": [day]}, f"day={day}/x.parquet")
    for first, second in (("day=*", "day=2*"), ("day=20", "../{}/day=20/x.parquet")):
        paths = [f"{tmp_path}/{first}", f"{tmp_path}/{second.format(tmp_path.name)}"]
        with pytest.raises(DataError, match=r"day=20/x.parquet: got the file twice, by .* and by"):
            fleet.data.parquet(paths)


def test_hidden_files_are_left_out(write: Write, tmp_path: Path) -> None:
    write({"n": [1]})
    write({"n": [1]}, "_temporary/b.parquet")
    write({"n": [1]}, ".c.parquet")
    (tmp_path / "_SUCCESS").touch()
    assert len(fleet.data.parquet(tmp_path)) == 1
    write({"n": [1]}, "day/d.parquet")
    assert len(fleet.data.parquet(f"{tmp_path}/*/")) == 1
    assert len(fleet.data.parquet(f"{tmp_path}/_temp*/")) == 1


def test_transform_makes_the_batch(write: Write) -> None:
    data = fleet.data.parquet(
        write({"n": range(9)}), transform=lambda batch: (batch["n"], batch["n"] * 2)
    )
    (first, double), *_ = data.loader(4)
    assert (first.tolist(), double.tolist()) == ([0, 1, 2, 3], [0, 2, 4, 6])


def test_loader_without_shuffling_keeps_the_order_of_files(tmp_path: Path) -> None:
    data = fleet.data.parquet(numbered(tmp_path, [25, 7, 13]))
    assert [n for batch in data.loader(8) for n in batch["number"].tolist()] == list(range(45))


def test_loader_shuffles_anew_each_epoch(tmp_path: Path) -> None:
    loader = fleet.data.parquet(numbered(tmp_path, [25, 7, 13])).loader(8, shuffle=True, window=10)
    first, second = ([n for b in loader for n in b["number"].tolist()] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(45))


@pytest.mark.slow
def test_processes_of_torch_may_load(tmp_path: Path) -> None:
    data = fleet.data.parquet(numbered(tmp_path, [25, 7, 13]))
    assert len(data.batch([3])["number"]) == 1
    loader = data.loader(8, shuffle=True, window=10, num_workers=2)
    assert sorted(numbers(loader).elements()) == list(range(45))


def test_plain_data_loader_reads_any_order(tmp_path: Path) -> None:
    data = fleet.data.parquet(numbered(tmp_path, [25, 7, 13]))
    loader = DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(0))
    assert sorted(numbers(loader).elements()) == list(range(45))


def test_loader_refuses_a_sampler(tmp_path: Path) -> None:
    data = fleet.data.parquet(numbered(tmp_path, [5]))
    with pytest.raises(ConfigError, match=r"loader\(sampler=\.\.\.\): the order of files"):
        data.loader(2, sampler=range(5))
    with pytest.raises(ConfigError, match="got window=0"):
        data.loader(2, window=0)


def test_groups_are_read_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = groups_read(monkeypatch)
    for _ in fleet.data.parquet(numbered(tmp_path, [100, 100])).loader(7, shuffle=True, window=25):
        pass
    assert sorted(read) == list(range(20))


# -- other formats


def test_arrow_files(tmp_path: Path) -> None:
    table = pa.table({"n": range(10), "s": [str(n) for n in range(10)]})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as to,
    ):
        to.write_table(table, max_chunksize=4)
    data = fleet.data.arrow(tmp_path, ["s", "n"])
    batch = batch_of(data, [9, 0, 4])
    assert batch["n"].tolist() == [9, 0, 4]
    assert batch["s"].tolist() == hash_column("s", ["9", "0", "4"]).tolist()
    assert list(data.group_rows) == [4, 4, 2]
    (tmp_path / "b.arrow").write_bytes(b"ARROW1 nonsense")
    with pytest.raises(DataError, match=r"b\.arrow: cannot be read as an Arrow file"):
        fleet.data.arrow(tmp_path)


@pytest.mark.multiprocess
def test_script_of_the_page_trains_with_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    items = [[*rng.integers(0, 2**60, n % 3)] if n % 4 else None for n in range(2_000)]
    ids = {name: rng.integers(0, 2**62, 2_000) for name in ("user", "site")}
    numbers = {"price": rng.random(2_000), "label": rng.integers(0, 2, 2_000)}
    table = pa.table({**ids, "items": pa.array(items, pa.list_(pa.int64())), **numbers})
    pq.write_table(table, tmp_path / "a.parquet")
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "columnar.md").read_text().partition("## A whole script")[2]
    program = page.split("```python\n")[1].split("```")[0].replace("/lake/clicks/", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line[:13] for line in done.stdout.splitlines()] == ["epoch 0: loss", "epoch 1: loss"], (
        done.stderr
    )


# -- `csv`: groups of lines, types of columns, and the errors of text files -----------------------


@pytest.mark.parametrize("end", ["\n", ""])
def test_csv_is_read_in_groups_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    lines = ["n,x,word", *(f"{n},{n / 2},w{n}" for n in range(500))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + end)
    monkeypatch.setattr(reading, "TextFormat", partial(text_file.TextFormat, group_bytes=100))
    data = fleet.data.csv(tmp_path / "a.csv")
    assert len(data) == 500 == sum(data.group_rows)
    assert len(data.group_rows) > 20
    batch = batch_of(data)
    assert batch["n"].tolist() == list(range(500))
    assert batch["x"].tolist() == [n / 2 for n in range(500)]
    assert batch["word"].tolist() == hash_column("word", [f"w{n}" for n in range(500)]).tolist()


def test_csv_without_names_and_with_tabs(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\t\t68fd1e64\n0\t3\t\n")
    data = fleet.data.csv(
        tmp_path,
        {"label": "label", "dense": ["I1"], "ids": ["C1"]},
        delimiter="\t",
        names=["label", "I1", "C1"],
        types={"C1": "string", "label": "float"},
        fill={"I1": 0, "C1": ""},
    )
    batch = batch_of(data)
    assert batch["label"].tolist() == [1, 0]
    assert batch["label"].dtype == torch.float32
    assert batch["dense"].tolist() == [[0], [3]]
    assert batch["ids"].ravel().tolist() == hash_column("C1", ["68fd1e64", ""]).tolist()


def test_wrong_text_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(DataError, match=r"a\.csv: cannot be read as text .*Expected 2 columns"):
        fleet.data.csv(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text('a,b\n1,"x\ny"\n')
    with pytest.raises(DataError):
        batch_of(fleet.data.csv(tmp_path / "b.csv"))
    (tmp_path / "c.csv").write_text("a,b\n1,2\n")
    (tmp_path / "d.csv").write_text("a,c\n1,2\n")
    with pytest.raises(DataError, match=r"d\.csv: got the columns a, c, expected a, b"):
        fleet.data.csv([tmp_path / "c.csv", tmp_path / "d.csv"])
    with pytest.raises(ConfigError, match="got delimiter='ab'"):
        fleet.data.csv(tmp_path / "c.csv", delimiter="ab")
    with pytest.raises(DataError, match=r"c\.csv, types: no column 'bb'; did you mean 'b'"):
        fleet.data.csv(tmp_path / "c.csv", types={"bb": "string"})
    with pytest.raises(ConfigError, match="not a type of Arrow"):
        fleet.data.csv(tmp_path / "c.csv", types={"a": "number"})


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("0.5", r"types=\{'b': 'float32'\}$"),
        ("x", r"types=\{'b': 'string'\}, or missing=\['', 'x'\] if it stands for no value$"),
        (f"{2**64}", r"types=\{'b': 'string'\}$"),
    ],
)
def test_value_of_another_type_than_the_first_lines_needs_a_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, advice: str
) -> None:
    monkeypatch.setattr(text_file, "_SAMPLE", 8)
    (tmp_path / "a.csv").write_text(f"a,b\n1,2\n3,4\n5,{value}\n")
    text = r"a\.csv, lines 2 to 4: .* CSV conversion error to int64: .*; give column 'b' its type: "
    with pytest.raises(DataError, match=text + advice):
        fleet.data.csv(tmp_path / "a.csv", ["b"]).batch([0])


def test_column_that_a_file_has_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,a\n1,2,3\n")
    for settings in ({}, {"columns": ["a"]}, {"columns": ["b"], "where": [("a", "==", 1)]}):
        with pytest.raises(DataError, match=r"a\.csv: got 2 columns 'a', expected one"):
            fleet.data.csv(tmp_path / "a.csv", **settings)
    assert fleet.data.csv(tmp_path / "a.csv", ["b"]).batch([0])["b"].tolist() == [2]


# -- damaged Arrow files, and files whose statistics or first lines mislead -----------------------


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
    with refuses(DataError, "b.parquet, column 'at'", "timestamp[us]", "timestamp[ms] as in"):
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
