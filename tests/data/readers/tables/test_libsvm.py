# SPDX-License-Identifier: Apache-2.0
"""The LibSVM format."""

from pathlib import Path

import pytest
import torch
from tests.data.simulated import single
from torch.utils.data import DataLoader, Subset

from fleetlight.data import FileStream, LibSVM, SparseRows
from fleetlight.errors import DataError

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


def test_streamed_records_are_equal(data: LibSVM, tmp_path: Path) -> None:
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
def test_a_bad_line_is_named(tmp_path: Path, bad: str, message: str) -> None:
    (tmp_path / "x.svm").write_text(f"1 3:4\n{bad}\n1 3:4\n")
    with pytest.raises(DataError, match=rf"x\.svm, line 2: {message}"):
        LibSVM(tmp_path / "x.svm")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone, after line 0: cannot be read"):
        LibSVM(tmp_path / "gone")
