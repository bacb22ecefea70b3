# SPDX-License-Identifier: Apache-2.0
"""Lines split at separators."""

import pytest
import torch

from fleetlight.data import hash_column
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
