# SPDX-License-Identifier: Apache-2.0
"""Data sets that build whole batches."""

from typing import NamedTuple

import pytest
import torch
from tests.data.simulated import single
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from fleetlight.data.records import BatchRecords, TableDataset


class Point(NamedTuple):
    """The record of these tests."""

    place: Tensor
    colour: Tensor


def table(length: int = 6) -> TableDataset[Point]:
    return TableDataset(
        "points", Point(torch.arange(2 * length).reshape(-1, 2), torch.arange(length))
    )


def equal(one: Point, two: Point) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_record_is_a_row_of_the_table() -> None:
    data = table()
    assert (len(data), data.name, data.generated) == (6, "points", False)
    assert equal(data[2], Point(torch.tensor([4, 5]), torch.tensor(2)))
    assert equal(data[-1], data[5])
    assert [point.colour.item() for point in list(data)] == [*range(6)]  # type: ignore[call-overload]
    with pytest.raises(IndexError, match="points: got record 6, expected one of 6"):
        data[6]


@pytest.mark.parametrize("indices", [[4, 0], torch.tensor([4, 0])])
def test_a_batch_has_the_rows_of_its_indices(indices: list[int] | Tensor) -> None:
    batch = table().batch(indices)
    assert equal(batch, Point(torch.tensor([[8, 9], [0, 1]]), torch.tensor([4, 0])))


def test_every_loader_gives_equal_batches() -> None:
    data = table()
    expected = [data.batch([0, 1, 2, 3]), data.batch([4, 5])]
    loaders = (
        *(DataLoader(data, 4), data.loader(4), single(data.loader(4))),
        DataLoader(Subset(data, range(6)), 4, collate_fn=data.collate),
        data.loader(4, num_workers=1),
    )
    for loader in loaders:
        batches = list(loader)
        assert len(batches) == 2
        assert all(map(equal, batches, expected)), loader


def test_a_batch_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("taken apart")

    monkeypatch.setattr(BatchRecords, "__iter__", refuse)
    assert len(list(table().loader(4))) == 2


def test_a_batch_looks_like_a_list() -> None:
    rows = BatchRecords(table().batch(range(4)))
    assert [row.colour.item() for row in rows] == [0, 1, 2, 3]
    assert [row.colour.item() for row in rows[1:3]] == [1, 2]
    assert rows[-1].colour == 3
    assert equal(TableDataset.collate([rows[0], rows[2]]), table().batch([0, 2]))


def test_a_stand_in_is_named_as_generated() -> None:
    data = TableDataset("points", Point(torch.zeros(1, 2), torch.zeros(1)), generated=True)
    assert data.generated
    assert repr(data) == "<points (generated stand-in): 1 records>"
