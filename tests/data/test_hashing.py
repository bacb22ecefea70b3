# SPDX-License-Identifier: Apache-2.0
"""Ids of texts and of columns."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.data import hash_column, stable_hash
from fleetlight.errors import ConfigError

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
