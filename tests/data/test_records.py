# SPDX-License-Identifier: Apache-2.0
"""Data sets that build whole batches, hashes and random bits, and processes that load."""

import os
import signal
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.simulated import single
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from fleetlight.data import hash_column, stable_hash
from fleetlight.data.loader import ShardLoader
from fleetlight.data.loading_processes import surviving_sigterm
from fleetlight.data.random_bits import key_of, lanes, uniform
from fleetlight.data.records import BatchRecords, TableDataset
from fleetlight.errors import ConfigError
from fleetlight.kernels.ids.hashing import mix


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


# -- ids of texts and of columns ------------------------------------------------------------------

TEXTS = ["", "a", "05db9164", "Straße", "a longer text than one word"]


def test_ids_never_change() -> None:
    # saved models find their rows by these ids
    assert stable_hash(TEXTS).tolist() == [
        3786468572763441381,
        -8372949829767051734,
        489555198308939147,
        -3874025142037319040,
        -7769497572229627817,
    ]
    assert stable_hash(TEXTS, "C1").tolist() == [
        -6943254065364200307,
        -3076731489240559981,
        -4453177452488507687,
        3471385513240503037,
        -4099676445436219482,
    ]
    assert hash_column("user", [1, 2, -3]).tolist() == [
        -2658228302570462143,
        558879648596940359,
        8647119880560918264,
    ]


def splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def by_hand(text: bytes, key: int) -> int:
    """The definition of an id, for one text, one word of 8 bytes at a time."""
    state = splitmix64(key ^ len(text))
    for start in range(0, len(text), 8):
        state = splitmix64(state ^ int.from_bytes(text[start : start + 8], "little"))
    return splitmix64(state)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40)), st.text(max_size=9))
def test_ids_follow_the_definition(texts: list[bytes], salt: str) -> None:
    key = by_hand(salt.encode(), splitmix64(1))
    expected = [by_hand(text, key) for text in texts]
    assert [id % 2**64 for id in stable_hash(texts, salt).tolist()] == expected


@settings(deadline=None)
@given(st.lists(st.text(max_size=40)), st.text(max_size=3))
def test_an_id_does_not_depend_on_other_texts(texts: list[str], salt: str) -> None:
    together = stable_hash(texts, salt)
    assert together.dtype == torch.int64
    assert together.tolist() == [int(stable_hash([text], salt)[0]) for text in texts]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30), unique=True))
def test_different_texts_have_different_ids(texts: list[bytes]) -> None:
    assert len(set(stable_hash(texts).tolist())) == len(texts)


def test_a_text_and_its_bytes_have_the_same_id() -> None:
    assert torch.equal(stable_hash(TEXTS), stable_hash([text.encode() for text in TEXTS]))
    # such texts come from file names and cannot be encoded strictly
    assert len(stable_hash(["\udcff"])) == 1


def test_ids_are_spread_evenly() -> None:
    ids = stable_hash([f"{i:08x}" for i in range(50_000)]).numpy()
    assert len(np.unique(ids)) == len(ids)
    for bits in (ids & 63, (ids >> 58) & 63):
        counts = np.bincount(bits, minlength=64)
        assert np.abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())


def test_salts_give_different_ids() -> None:
    assert len({stable_hash(["x"], salt).item() for salt in ("", "C1", "C2", "x")}) == 4


def test_hash_column_salts_with_the_name() -> None:
    assert torch.equal(hash_column("C1", TEXTS), stable_hash(TEXTS, "C1"))
    assert torch.equal(hash_column("C1", np.array(TEXTS[:2])), stable_hash(TEXTS[:2], "C1"))
    numbers = torch.arange(-50, 50).reshape(10, 10)
    ids = hash_column("user", numbers)
    assert (ids.shape, len(ids.unique())) == ((10, 10), 100)
    assert torch.equal(ids, hash_column("user", numbers.numpy().astype(np.int32)))
    assert not torch.isin(ids, hash_column("film", numbers)).any()
    assert len(hash_column("user", [])) == 0


def test_wrong_input_is_named() -> None:
    with pytest.raises(ConfigError, match="got the text 'abc', expected a list"):
        stable_hash("abc")
    with pytest.raises(ConfigError, match=r"hash_column 'age': got float32.*bins"):
        hash_column("age", torch.tensor([1.5]))
    with pytest.raises(ConfigError, match="expected a list of texts"):
        stable_hash([1, 2])  # type: ignore[list-item]


# -- random bits as a pure function of numbers ----------------------------------------------------


def test_mix_is_splitmix64() -> None:
    # the first numbers of the published generator, started at 0
    states = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert [hex(value) for value in mix(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


def test_keys_depend_on_all_parts_and_their_order() -> None:
    keys = [key_of(*parts) for parts in [(1,), (2,), (-1,), (1, 2), (2, 1), (1, 2, 0)]]
    assert len(set(map(int, keys))) == len(keys)
    assert key_of(1, 2) == key_of(1, 2)


def test_uniform_numbers_are_even_and_uncorrelated() -> None:
    draws = uniform(lanes(mix(np.arange(20_000, dtype=np.uint64)), 3))
    assert 0 <= draws.min() < draws.max() < 1
    assert np.abs(np.histogram(draws, 20, (0, 1))[0] - 3_000).max() < 5 * np.sqrt(3_000)
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.03


# -- the processes that load batches survive a SIGTERM which the job handles itself ---------------


class Terminated(Dataset[int]):
    """Sends SIGTERM to the process that loads it, as Slurm does."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return index


@pytest.fixture
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_handled")
def test_batches_arrive_after_sigterm() -> None:
    loader = DataLoader(Terminated(), batch_size=1, num_workers=1)
    sharded = ShardLoader[torch.Tensor](loader, worker=0, workers=1, seed=0, tail="join")
    assert [int(batch) for batch in sharded] == [0, 1, 2, 3]


def test_nothing_changes_where_sigterm_ends_the_process() -> None:
    assert surviving_sigterm(None) is None
    assert surviving_sigterm(print) is print


@pytest.mark.usefixtures("_handled")
def test_function_of_the_user_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    begin = surviving_sigterm(print)
    assert begin is not None
    begin(7)
    assert capsys.readouterr().out == "7\n"
