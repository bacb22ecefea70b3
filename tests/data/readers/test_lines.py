# SPDX-License-Identifier: Apache-2.0
"""Lines with their file and line number."""

import gzip
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fleetlight.data.readers.lines import existing, lines_of, located, table_of
from fleetlight.errors import DataError


def test_blank_lines_and_headers_are_skipped_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"top\n\na\n  \r\nb")
    assert list(lines_of(str(path), header=1)) == [(b"a\n", str(path), 3), (b"b", str(path), 5)]


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % i for i in range(10_000)))[:-2000])
    with pytest.raises(DataError, match=rf"{path}, after line \d+: cannot be read"):
        list(lines_of(str(path)))


def test_errors_of_any_kind_name_their_line() -> None:
    lines = [(b"1\n", "f", 7), (b"0\n", "f", 8)]
    with pytest.raises(DataError, match=r"f, line 8: ZeroDivisionError") as caught:
        located(lambda texts: [1 // int(text) for text in texts], lines)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_without_a_faulty_line_is_unchanged() -> None:
    def parse(texts: list[bytes]) -> None:
        if len(texts) > 1:
            raise ValueError("too many")

    with pytest.raises(ValueError, match=r"^too many$"):
        located(parse, [(b"1\n", "f", 7), (b"0\n", "f", 8)])


class Numbers(NamedTuple):
    """The batch of these tests."""

    value: Tensor


def parse(lines: list[bytes]) -> Numbers:
    return Numbers(torch.tensor([*map(int, lines)]))


def test_chunks_of_long_files_are_concatenated(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("head\n" + "".join(f"{i}\n" for i in range(40_000)))
    whole = table_of(tmp_path / "x", parse, lambda line: line == b"head\n")
    assert torch.equal(whole.value, torch.arange(40_000))


def test_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("head\n")
    with pytest.raises(DataError, match=r"x: got no records"):
        table_of(tmp_path / "x", parse, lambda line: line == b"head\n")


def test_existing_expands_patterns(tmp_path: Path) -> None:
    for name in ("b[1]", "a"):
        (tmp_path / name).touch()
    assert existing(f"{tmp_path}/*") == [str(tmp_path / "a"), str(tmp_path / "b[1]")]
    assert existing(tmp_path / "b[1]") == [str(tmp_path / "b[1]")]
    with pytest.raises(DataError, match="an empty list"):
        existing([])
