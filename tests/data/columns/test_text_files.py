# SPDX-License-Identifier: Apache-2.0
"""`csv`: groups of lines, types of columns, and the errors of text files."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fleetlight as fleet
from fleetlight.data import hash_column
from fleetlight.data.columns import reading
from fleetlight.data.columns.files import text_file
from fleetlight.errors import ConfigError, DataError


def batch_of(data: Any) -> Any:
    return data.batch(range(len(data)))


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
