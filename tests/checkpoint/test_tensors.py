# SPDX-License-Identifier: Apache-2.0
"""Tensors are restored bit for bit, and safetensors reads the files."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.states import snapshot, whole_step
from torch import Tensor

from fleetlight import checkpoint
from fleetlight.checkpoint.formats import tables
from fleetlight.checkpoint.formats.tables import TableOnDisk
from fleetlight.checkpoint.formats.tensors import (
    CODES,
    describe_tensors,
    read_tensors,
    write_tensors,
)
from fleetlight.checkpoint.snapshot import SavedTables
from fleetlight.checkpoint.storage import manifest
from fleetlight.checkpoint.storage.files import FileTarget, Sink
from fleetlight.errors import CheckpointError, CorruptCheckpointError


def encoded(tensors: dict[str, Tensor]) -> bytes:
    out = io.BytesIO()
    write_tensors(out, tensors)
    return out.getvalue()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """Arbitrary bits, NaNs included; booleans must be 0 or 1."""
    count = int(np.prod(shape)) * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (count,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


tensors = st.builds(
    random_tensor,
    st.sampled_from(list(CODES)),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 2**32),
)
names = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda n: n != "__metadata__")


@settings(deadline=None)
@given(st.dictionaries(names, tensors, max_size=5))
def test_tensors_survive_the_round_trip(state: dict[str, Tensor]) -> None:
    found = safetensors.torch.load(encoded(state))
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def test_views_of_all_kinds_are_written(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    wave = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {
        "base": base,
        "transposed": base.T,
        "slice": base[1:, ::2],
        "expanded": base[0, 0].expand(5),
        "conj": wave.conj(),
        "neg": torch._neg_view(torch.ones(3)),
        "parameter": torch.nn.Parameter(base),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    with Sink(tmp_path / "t") as sink:
        write_tensors(sink, state)
    found = read_tensors(tmp_path / "t")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.detach()), name


def test_data_is_aligned() -> None:
    data = encoded({"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(3).double()})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["b"]["data_offsets"] == [0, 24]
    assert header["a"]["data_offsets"] == [24, 25]
    assert header["__metadata__"] == {"format": "pt"}


def test_a_tensor_is_written_without_a_copy() -> None:
    class Writer:
        shared = False

        def write(self, data: bytes | memoryview) -> None:
            if isinstance(data, memoryview):
                self.shared = np.shares_memory(np.frombuffer(data, np.uint8), tensor.numpy())

    tensor = torch.ones(1000)
    writer = Writer()
    write_tensors(writer, {"a": tensor})
    assert writer.shared


def test_entries_describe_tensors() -> None:
    (entry,) = describe_tensors({"a": torch.ones(2, 3).bfloat16()}, "buffer", "f")
    assert (entry.name, entry.kind, entry.dtype, entry.shape) == ("a", "buffer", "bfloat16", (2, 3))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2).to_sparse(), r"got a torch.sparse_coo torch.float32 tensor"),
        (torch.ones(2, dtype=torch.complex128), "got a torch.strided torch.complex128"),
        (torch.ones(2, device="meta"), "on meta, expected a dense one with data"),
        (torch.nn.UninitializedParameter(), "has no shape yet; run the model once"),
    ],
)
def test_an_unsupported_tensor_is_named(tensor: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"'layer.w' .*{message}"):
        encoded({"layer.w": tensor})


def test_a_tensor_subclass_is_named() -> None:
    class Scaled(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match="'w' cannot be saved: got a Scaled"):
        encoded({"w": torch.ones(2).as_subclass(Scaled)})


def test_a_reserved_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="named '__metadata__' cannot be saved"):
        encoded({"__metadata__": torch.ones(1)})


def test_a_file_that_is_not_safetensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"garbage" * 10)
    with pytest.raises(CorruptCheckpointError, match="t is not a safetensors file"):
        read_tensors(tmp_path / "t")


# -- tables of a checkpoint: read by id, whichever server wrote them, and exported ----------------

#: the ids of two servers, in no common order
PARTS = [torch.tensor([7, -3, 12]), torch.tensor([5, 2**40, 0, -(2**62)])]


def rows_of(ids: Tensor) -> Tensor:
    """Rows computed from their ids."""
    return torch.stack([(ids % 1009).float(), (ids % 13).float()], 1)


def entry(name: str, rows: int, ids: int = 0, weights: tuple[str, ...] = ()) -> manifest.TableEntry:
    return manifest.TableEntry(
        name=name,
        dim=2,
        rows=rows,
        rule="sgd",
        options={},
        initializer=("zeros", 0.0, 0.0),
        entry=None,
        ids=ids,
        weights=list(weights),
        files=[manifest.TableFileEntry(f"{name}-{server}", server, 0) for server in range(2)],
    )


def written(target: FileTarget, name: str, parts: list[Tensor]) -> list[manifest.FileEntry]:
    """Writes the files of a table, as servers do."""
    entries = []
    for server, ids in enumerate(parts):
        with Sink(Path(target.location, f"{name}-{server}")) as sink:
            data = {"ids": ids, "weights": rows_of(ids), "buckets": torch.zeros(3).long()}
            sink.write(safetensors.torch.save(data))
            entries.append(sink.flush())
    return entries


def job(*more: manifest.TableEntry) -> checkpoint.JobSnapshot:
    """A job with a table of open ids, and one of the ids 0 to 4 that replaces a bias."""

    def save_tables(target: FileTarget) -> SavedTables:
        moved = [torch.tensor([4, 0, 2]), torch.tensor([3, 1])]
        files = written(target, "ads", PARTS) + written(target, "words", moved)
        found = [entry("ads", 7), entry("words", 5, ids=5, weights=("bias",)), *more]
        return SavedTables(found, files, [manifest.HighWaterEntry(0, 1, 0, 9)])

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
    assert saved.manifest.high_water == [manifest.HighWaterEntry(0, 1, 0, 9)]
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
