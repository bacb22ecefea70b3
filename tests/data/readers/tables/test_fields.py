# SPDX-License-Identifier: Apache-2.0
"""Lines split at separators, and the readers of tables made of them."""

import gzip
import math
import pickle
from pathlib import Path

import pytest
import torch
from tests.data.simulated import single
from torch.utils.data import DataLoader, Subset

import fleetlight as fleet
from fleetlight.data import (
    Adult,
    ClickLog,
    Criteo,
    FileStream,
    LibSVM,
    MovieLens,
    Record,
    SparseRows,
    hash_column,
    stable_hash,
)
from fleetlight.data.readers.tables.fields import Fields
from fleetlight.errors import DataError

NAMES = ("a", "b", "c")


def fields(*lines: bytes) -> Fields:
    return Fields.of(lines, b",", NAMES)


def test_numbers_are_parsed() -> None:
    table = fields(b"1,-2,3e2\n", b"0.5,,7\r\n", b"4,5,6")
    expected = torch.tensor([[1, -2, 300], [0.5, 9, 7], [4, 5, 6]], dtype=torch.float64)
    assert torch.equal(table.numbers(missing=9), expected)
    assert torch.equal(table[2:].numbers(), expected[:, 2:])
    assert torch.equal(table.only(["c", "a"]).numbers(), expected[:, [2, 0]])


def test_whole_numbers_keep_all_their_digits() -> None:
    table = fields(b"9223372036854775807,-9223372036854775808,1")
    assert table.integers().tolist() == [[2**63 - 1, -(2**63), 1]]


def test_ids_equal_those_of_hash_column() -> None:
    table = fields(b"x,,a longer one", "y,ä,x".encode())
    columns = zip(*[("x", "", "a longer one"), ("y", "ä", "x")], strict=True)
    expected = [hash_column(name, column) for name, column in zip(NAMES, columns, strict=True)]
    assert torch.equal(table.ids(), torch.stack(expected, 1))


@pytest.mark.parametrize("line", [b"1,2", b"1,2,3,4", b""])
def test_a_wrong_number_of_fields_is_refused(line: bytes) -> None:
    count = line.count(b",") + 1
    with pytest.raises(DataError, match=f"got {count} fields between ',', expected 3: a to c"):
        fields(b"1,2,3", line)


@pytest.mark.parametrize("text", [b"x", b"", b"nan", b"1e999", b"\xff"])
def test_a_field_that_is_not_a_number_is_named(text: bytes) -> None:
    with pytest.raises(DataError, match="as b, expected a number"):
        fields(b"1,2,3", b"1," + text + b",3").numbers()


@pytest.mark.parametrize("text", [b"1.5", b"9223372036854775808"])
def test_a_field_that_is_not_a_whole_number_is_named(text: bytes) -> None:
    with pytest.raises(DataError, match=f"got '{text.decode()}' as b, expected a whole number"):
        fields(b"1," + text + b",3").integers()


def test_a_field_of_too_many_characters_is_refused() -> None:
    with pytest.raises(DataError, match="got a field of 100000 characters"):
        fields(b"1,2," + b"3" * 100_000).numbers()


# -- the LibSVM format ----------------------------------------------------------------------------

TEXT = "1 qid:7 3:0.5 10:1  # note\n-1\n0 qid:8 9223372036854775807:2\n2.5 1:1 2:-1 4:1e-3\n"


@pytest.fixture
def data(tmp_path: Path) -> LibSVM:
    (tmp_path / "x.svm").write_text(TEXT)
    return LibSVM(tmp_path / "x.svm")


def as_lists(rows: SparseRows) -> list[list[float]]:
    return [column.tolist() for column in rows]


def test_batches_are_sparse_rows(data: LibSVM) -> None:
    assert len(data) == 4
    assert as_lists(data.batch([2, 0, 1])) == [
        [2**63 - 1, 3, 10],
        [2, 0.5, 1],
        [0, 1, 3],
        [0, 1, -1],
        [8, 7, -1],
    ]
    assert [column.dtype for column in data.batch([0])] == [
        *(torch.int64, torch.float32, torch.int64, torch.float32, torch.int64)
    ]


def test_a_record_is_a_batch_of_one(data: LibSVM) -> None:
    assert as_lists(data[3])[:3] == [[1, 2, 4], pytest.approx([1, -1, 1e-3]), [0]]
    assert as_lists(data[1]) == [[], [], [0], [-1], [-1]]
    rows = data.__getitems__([0, 3])
    assert [row.label.item() for row in rows] == [1, 2.5]
    assert as_lists(rows[-1]) == as_lists(data[3])


def test_all_loaders_give_equal_batches(data: LibSVM) -> None:
    expected = [as_lists(data.batch([0, 1, 2])), as_lists(data.batch([3]))]
    for loader in (
        data.loader(3),
        DataLoader(Subset(data, range(4)), 3, collate_fn=data.collate),
        DataLoader([data[i] for i in range(4)], 3, collate_fn=data.collate),  # type: ignore[arg-type]
        single(data.loader(3)),
    ):
        assert [as_lists(batch) for batch in loader] == expected


def test_a_batch_is_valid_input_for_embedding_bags(data: LibSVM) -> None:
    bag = torch.nn.EmbeddingBag.from_pretrained(torch.arange(12.0)[:, None], mode="sum")
    batch = data.batch([0, 1, 3])
    sums = bag(batch.ids, batch.offsets, per_sample_weights=batch.values)
    assert sums.squeeze(1).tolist() == pytest.approx([11.5, 0, 1 - 2 + 0.004])


def test_streamed_records_of_libsvm_are_equal(data: LibSVM, tmp_path: Path) -> None:
    (batch,) = FileStream(tmp_path / "x.svm", LibSVM.parse).loader(10)
    assert as_lists(batch) == as_lists(data.batch(range(4)))


def test_long_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("".join(f"{i} {i}:{i}\n" for i in range(1, 20_001)))
    data = LibSVM(tmp_path / "x")
    assert as_lists(data.batch([16_500]))[:4] == [[16_501], [16_501], [0], [16_501]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1 3", "got '3', expected index:value"),
        ("1 3:4:5", "got '3:4:5', expected index:value"),
        ("x 3:4", ".*x.*; expected a number as label"),
        ("1 x:4", ".*x.*; expected a whole number as index"),
        ("1 3:nan", "got 'nan', expected a number as value"),
        ("1 qid:x 3:4", ".*x.*; expected a whole number as query"),
        ("# only", "got only a comment"),
    ],
)
def test_a_bad_line_of_libsvm_is_named(tmp_path: Path, bad: str, message: str) -> None:
    (tmp_path / "x.svm").write_text(f"1 3:4\n{bad}\n1 3:4\n")
    with pytest.raises(DataError, match=rf"x\.svm, line 2: {message}"):
        LibSVM(tmp_path / "x.svm")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone, after line 0: cannot be read"):
        LibSVM(tmp_path / "gone")


# -- the Adult census -----------------------------------------------------------------------------

RICH = (
    "50, Private, 83311, Bachelors, 13, Married, Exec, Husband, White, Male, 100, 0, 13, "
    "United-States, >50K"
)
POOR = "38,?,215646,HS-grad,9,Divorced,Cleaners,Not-in-family,Black,Female,0,0,40,?,<=50K"
HEADER = "age, workclass, fnlwgt, education, Salary"


def test_records_of_adult_are_read(tmp_path: Path) -> None:
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
def test_a_bad_line_of_adult_is_named(tmp_path: Path, bad: str, message: str) -> None:
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


# -- click logs of Criteo -------------------------------------------------------------------------

COUNTS = ["3", "-2", "", "0", *["7"] * 9]
CATEGORIES = ["05db9164", "", *[f"{i:08x}" for i in range(24)]]


def line(label: str = "1", counts: list[str] = COUNTS, ids: list[str] = CATEGORIES) -> str:
    return "\t".join([label, *counts, *ids]) + "\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(line() + line("0", ["1"] * 13, [""] * 26))
    return tmp_path


def test_records_of_criteo_are_read(root: Path) -> None:
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


def test_streamed_records_of_criteo_are_equal(root: Path) -> None:
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
def test_a_bad_line_of_criteo_is_named(root: Path, bad: str, message: str) -> None:
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


# -- MovieLens in its three formats ---------------------------------------------------------------

FORMS = {
    "ml-100k/u.data": "196\t242\t3\t881250949\n186\t302\t4\t891717742\n",
    "ml-1m/ratings.dat": "196::242::3::881250949\n186::302::4::891717742\n",
    "ratings.csv": "userId,movieId,rating,timestamp\n196,242,3.0,881250949\n186,302,4,891717742\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_all_three_formats_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(FORMS[name])
    ratings = MovieLens(tmp_path).columns
    assert [column.tolist() for column in ratings] == [
        *([196, 186], [242, 302], [3.0, 4.0], [881250949, 891717742])
    ]
    assert [column.dtype for column in ratings] == [
        *(torch.int64, torch.int64, torch.float32, torch.int64)
    ]


def test_ratings_can_be_streamed(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(FORMS["ratings.csv"])
    (batch,) = FileStream(tmp_path / "r.csv", MovieLens.parse, header=1).loader(10)
    assert batch.film.tolist() == [242, 302]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1\t2\t3\n", "got 3 fields between .*, expected 4: user to time"),
        ("1\tx\t3\t4\n", "got 'x' as film, expected a whole number"),
        ("1\t2\tmany\t4\n", "got 'many' as stars, expected a number"),
    ],
)
def test_a_bad_line_of_movielens_is_named(tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "u.data"
    path.write_text(FORMS["ml-100k/u.data"] + bad)
    with pytest.raises(DataError, match=rf"u\.data, line 3: {message}"):
        MovieLens(path)


def test_the_stand_in_can_be_learned(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ratings\.csv or ratings\.dat or u\.data"):
        MovieLens(tmp_path)
    data = MovieLens(tmp_path, stand_in=True)
    assert data.generated
    user, film, stars, _ = data.columns
    assert set((2 * stars).tolist()) == set(range(1, 11))
    # users differ in taste, so the first factors of the ratings are stronger than chance
    table = torch.zeros(int(user.max()) + 1, int(film.max()) + 1)
    table[user, film] = stars - stars.mean()
    strengths = torch.linalg.svdvals(table)
    assert strengths[3] > 1.5 * strengths[4]
