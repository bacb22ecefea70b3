# SPDX-License-Identifier: Apache-2.0
"""The file of a table is plain safetensors, and a damaged one is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open
from tests.ps.made_tables import ALL, LR, by_id, make, ones, saved, some_ids

from fleetlight.errors import CheckpointError, CorruptCheckpointError
from fleetlight.kernels import BUCKETS, RULES
from fleetlight.ps.tables.table_file import TableReader, columns_of, write_table


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("meta", [0, 4])
def test_columns_cover_a_row(rule: str, meta: int) -> None:
    kept = RULES[rule]
    columns = columns_of(8, kept, meta)
    assert [c.stop for c in columns[:-1]] == [c.start for c in columns[1:]]
    assert columns[0].start == 0
    assert columns[-1].stop == 8 + kept.state_width(8) + meta
    assert len({c.name for c in columns}) == len(columns)


def test_the_file_describes_itself(tmp_path: Path) -> None:
    table = make("rowwise_adagrad")
    table.push(some_ids(9), ones(9), LR, 0)
    tensors = saved(table, tmp_path)
    assert tensors["state.sum"].shape == (9, 1)
    with safe_open(tmp_path / "t.safetensors", framework="np") as file:
        expected = {"format": "pt", "table": "emb", "rule": "rowwise_adagrad"}
        assert file.metadata() == expected
    assert TableReader(tmp_path / "t.safetensors").about == expected


def test_the_file_is_on_disk_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr("os.fsync", lambda fd: flushed.append(os.fstat(fd).st_size))
    saved(make("sgd"), tmp_path)
    assert flushed == [(tmp_path / "t.safetensors").stat().st_size]


def test_a_range_of_buckets_is_read_in_chunks(tmp_path: Path) -> None:
    table = make("momentum")
    table.push(some_ids(500), ones(500), LR, 0)
    tensors = saved(table, tmp_path)
    reader = TableReader(tmp_path / "t.safetensors")
    columns = columns_of(3, RULES["momentum"], 1)
    blank = np.arange(7, dtype=np.float32)
    mine = range(BUCKETS // 3, BUCKETS // 2)
    first, last = reader.span(mine)
    pieces = list(reader.pieces(mine, columns, blank, 30))
    assert {len(ids) for ids, _ in pieces[:-1]} == {30}
    assert np.array_equal(np.concatenate([ids for ids, _ in pieces]), tensors["ids"][first:last])
    rows = np.concatenate([rows for _, rows in pieces])
    assert np.array_equal(rows[:, :3], tensors["weights"][first:last])
    assert np.array_equal(rows[:, 3:6], tensors["state.momentum_buffer"][first:last])
    assert (rows[:, 6] == 6).all()  # the file has no meta


def test_a_file_with_too_few_rows_is_discarded(tmp_path: Path) -> None:
    path, ids = tmp_path / "t.safetensors", np.arange(3, dtype=np.int64)
    columns = columns_of(2, RULES["sgd"], 0)
    with pytest.raises(CheckpointError, match=r"t\.safetensors: got 3 rows, expected 4"):
        write_table(path, columns, 4, [(ids, np.ones((3, 2), np.float32))], {})
    assert not path.exists()


def test_a_file_without_an_index_is_read_whole(tmp_path: Path) -> None:
    table = make("momentum")
    table.push(some_ids(500), ones(500), LR, 0)
    indexed = by_id([saved(table, tmp_path)])
    entry = table.save(table.cut(ordered=False), 4, tmp_path, "any.safetensors")
    reader = TableReader(tmp_path / "any.safetensors")
    reader.compare(entry.bytes, entry.sha256)
    assert reader.span(None) == (0, entry.rows) == (0, 500)
    assert by_id([safetensors.numpy.load_file(reader.path)]) == indexed
    again = make("momentum")
    with pytest.raises(CheckpointError, match=r"any\.safetensors has no index of its rows: only"):
        again.load([reader.path], ALL)
    again.load([reader.path], None)
    assert by_id([saved(again, tmp_path, "again.safetensors")]) == indexed


def edited(data: bytes, edit: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    """The file with a changed header of the same length."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    return data[:8] + text[:length] + data[8 + length :]


def with_index(data: bytes, bucket: int, start: int) -> bytes:
    """The file with a changed start of one bucket."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    at = 8 + length + header["buckets"]["data_offsets"][0] + 8 * bucket
    return data[:at] + start.to_bytes(8, "little", signed=True) + data[at + 8 :]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda d: b"", ""),
        (lambda d: b"garbage", "less than its header"),
        (lambda d: b"\xff" * 64, "less than its header"),
        (lambda d: d[:-4], "it was truncated"),
        (lambda d: d[:8] + b"[" * 64 + d[72:], ""),
        (lambda d: edited(d, lambda h: h.pop("ids")), "'ids'"),
        (lambda d: edited(d, lambda h: h["ids"].update(dtype="F32")), ""),
        (lambda d: edited(d, lambda h: h["ids"].update(dtype="I9")), "'I9'"),
        (lambda d: edited(d, lambda h: h["weights"].update(shape=[1, 3])), ""),
        (lambda d: edited(d, lambda h: h.update(ids=3)), ""),
        (lambda d: with_index(d, BUCKETS, 8), "its index does not fit its ids"),
        (lambda d: with_index(d, 5, 10**6), "its index is not in order"),
        (lambda d: with_index(d, 0, -1), "its index is not in order"),
    ],
)
def test_damaged_files_are_refused(
    damage: Callable[[bytes], bytes], why: str, tmp_path: Path
) -> None:
    table = make("adam")
    table.push(some_ids(9), ones(9), LR, 0)
    saved(table, tmp_path)
    path = tmp_path / "t.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptCheckpointError, match="not the file of a table") as raised:
        make("adam").load([path], ALL)
    assert str(path) in str(raised.value)
    assert why in str(raised.value)
