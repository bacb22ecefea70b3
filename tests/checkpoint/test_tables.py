# SPDX-License-Identifier: Apache-2.0
"""Tables of a checkpoint: read by id, whichever server wrote them, and exported."""

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.checkpoint.states import snapshot, whole_step
from torch import Tensor

from fleetlight import checkpoint
from fleetlight.checkpoint.formats import tables
from fleetlight.checkpoint.formats.tables import TableOnDisk
from fleetlight.checkpoint.snapshot import SavedTables
from fleetlight.checkpoint.storage.files import FileTarget, Sink
from fleetlight.checkpoint.storage.manifest import (
    FileEntry,
    HighWaterEntry,
    TableEntry,
    TableFileEntry,
)
from fleetlight.errors import CheckpointError, CorruptCheckpointError

#: the ids of two servers, in no common order
PARTS = [torch.tensor([7, -3, 12]), torch.tensor([5, 2**40, 0, -(2**62)])]


def rows_of(ids: Tensor) -> Tensor:
    """Rows computed from their ids."""
    return torch.stack([(ids % 1009).float(), (ids % 13).float()], 1)


def entry(name: str, rows: int, ids: int = 0, weights: tuple[str, ...] = ()) -> TableEntry:
    return TableEntry(
        name=name,
        dim=2,
        rows=rows,
        rule="sgd",
        options={},
        initializer=("zeros", 0.0, 0.0),
        entry=None,
        ids=ids,
        weights=list(weights),
        files=[TableFileEntry(f"{name}-{server}", server, 0) for server in range(2)],
    )


def written(target: FileTarget, name: str, parts: list[Tensor]) -> list[FileEntry]:
    """Writes the files of a table, as servers do."""
    entries = []
    for server, ids in enumerate(parts):
        with Sink(Path(target.location, f"{name}-{server}")) as sink:
            data = {"ids": ids, "weights": rows_of(ids), "buckets": torch.zeros(3).long()}
            sink.write(safetensors.torch.save(data))
            entries.append(sink.flush())
    return entries


def job(*more: TableEntry) -> checkpoint.JobSnapshot:
    """A job with a table of open ids, and one of the ids 0 to 4 that replaces a bias."""

    def save_tables(target: FileTarget) -> SavedTables:
        moved = [torch.tensor([4, 0, 2]), torch.tensor([3, 1])]
        files = written(target, "ads", PARTS) + written(target, "words", moved)
        found = [entry("ads", 7), entry("words", 5, ids=5, weights=("bias",)), *more]
        return SavedTables(found, files, [HighWaterEntry(0, 1, 0, 9)])

    return dataclasses.replace(snapshot(1), save_tables=save_tables, server_num=2, epoch=3)


def test_the_manifest_lists_the_tables(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, job())
    saved = checkpoint.read(tmp_path)
    saved.verify()
    assert [(t.name, t.rows, t.ids) for t in saved.manifest.tables] == [
        ("ads", 7, 0),
        ("words", 5, 5),
    ]
    assert (saved.manifest.servers, saved.manifest.epoch) == (2, 3)
    assert saved.manifest.high_water == [HighWaterEntry(0, 1, 0, 9)]
    names = set(saved.files())
    assert set(saved.files(tables=False)) == {
        name for name in names if not name.startswith(("ads", "words"))
    }


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_rows_are_sorted_by_id(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_PIECE", piece)
    checkpoint.write(tmp_path, job())
    saved = checkpoint.read(tmp_path)
    table = saved.table(saved.manifest.tables[0])
    assert table.ids.tolist() == sorted(torch.cat(PARTS).tolist())
    assert torch.equal(tables.materialize(table.weight()), rows_of(table.ids))
    assert torch.equal(saved.moved_weights()["bias"], rows_of(torch.arange(5)))


def test_export_has_ids_and_rows_and_whole_weights(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "ckpt", job())
    found = safetensors.torch.load_file(checkpoint.export(tmp_path / "ckpt", tmp_path / "out"))
    assert sorted(found) == ["ads.ids", "ads.weight", "bias", "weight"]
    assert found["ads.ids"].tolist() == sorted(torch.cat(PARTS).tolist())
    assert torch.equal(found["ads.weight"], rows_of(found["ads.ids"]))
    assert torch.equal(found["bias"], rows_of(torch.arange(5)))


def test_an_empty_table_is_read() -> None:
    table = TableOnDisk(entry("ads", 0), [])
    assert table.ids.tolist() == []
    assert tables.materialize(table.weight()).shape == (0, 2)


def test_a_lost_file_of_a_table_is_an_error(tmp_path: Path) -> None:
    parts = [{"ids": ids, "weights": rows_of(ids)} for ids in PARTS]
    with pytest.raises(CorruptCheckpointError, match=r"'ads': its files have 3 rows, .* says 7"):
        TableOnDisk(entry("ads", 7), parts[:1])
    moved = TableOnDisk(entry("ads", 7, ids=7), parts)
    with pytest.raises(CorruptCheckpointError, match="7 rows, expected one for each id from 0 to"):
        moved.dense()


def test_a_failed_table_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))

    def fail(target: FileTarget) -> SavedTables:
        written(target, "ads", PARTS)
        raise CheckpointError("server 1 is gone")

    with pytest.raises(CheckpointError, match="server 1 is gone"):
        checkpoint.write(tmp_path, dataclasses.replace(snapshot(2), save_tables=fail))
    assert whole_step(tmp_path) == 1
    assert len(list(tmp_path.glob("generation-*"))) == 1
