# SPDX-License-Identifier: Apache-2.0
"""Reading loads only the requested files, and verifies their bytes."""

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.checkpoint.states import snapshot, whole_step

from fleetlight import checkpoint
from fleetlight.errors import CheckpointError, CorruptCheckpointError

FILES = ["model.safetensors", "optimizer.safetensors", "worker-00000.json"]


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    changed = {
        "truncated": data[:-1],
        "edited": data[:-1] + bytes([data[-1] ^ 1]),
        "header": bytes([data[0] ^ 1]) + data[1:],
        "empty": b"",
        "longer": data + b"x",
    }
    path.write_bytes(changed[how])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["truncated", "edited", "header", "empty", "longer"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, how: str) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    damage(tmp_path / "generation-000001" / name, how)
    with pytest.raises(CorruptCheckpointError, match=f"{name} was .*got .*expected"):
        checkpoint.read(tmp_path).verify()


def test_a_swapped_file_is_named(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.write(tmp_path / str(step), snapshot(step))
    inside = Path("generation-000001/model.safetensors")
    (tmp_path / "1" / inside).write_bytes((tmp_path / "2" / inside).read_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors was changed"):
        checkpoint.read(tmp_path / "1").model()


def test_files_are_checked_only_when_they_are_read(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    damage(tmp_path / "generation-000001" / "optimizer.safetensors", "longer")
    found = checkpoint.read(tmp_path)
    assert found.model().tensors["bias"].tolist() == [1, 1]
    with pytest.raises(CorruptCheckpointError):
        found.optimizers()


def test_loaded_tensors_survive_the_removal_of_their_files(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    model = torch.nn.Linear(4, 2)
    mapped = checkpoint.read(tmp_path).model()
    checkpoint.load_model_state(model, mapped)
    checkpoint.write(tmp_path, snapshot(2))
    assert model.weight.unique().tolist() == mapped.tensors["weight"].unique().tolist() == [1]
    assert whole_step(tmp_path) == 2


def test_states_of_all_workers_are_read(tmp_path: Path) -> None:
    workers = [checkpoint.WorkerState(rank=rank, values={"r": rank}) for rank in range(3)]
    checkpoint.write(tmp_path, dataclasses.replace(snapshot(1), workers=workers, optimizers=()))
    found = checkpoint.read(tmp_path)
    assert found.manifest.workers == 3
    assert [worker.values["r"] for worker in found.workers()] == [0, 1, 2]
    assert found.worker(3) is None
    assert found.optimizers() == []


def test_export_is_a_plain_state_dict(tmp_path: Path) -> None:
    source, target = (
        torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False))
        for _ in range(2)
    )
    source[1].weight = source[0].weight
    model = checkpoint.model_state(source)
    checkpoint.write(tmp_path / "ckpt", checkpoint.JobSnapshot(model=model))
    out = checkpoint.export(tmp_path / "ckpt", tmp_path / "out.safetensors")
    target.load_state_dict(safetensors.torch.load_file(out))
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[1].weight, source[0].weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out.safetensors"]


def test_export_keeps_extra_state_in_the_metadata(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> int:
            return 7

        def set_extra_state(self, state: int) -> None:
            raise NotImplementedError

    model = checkpoint.model_state(Counting(1, 1))
    checkpoint.write(tmp_path / "ckpt", checkpoint.JobSnapshot(model=model))
    out = checkpoint.export(tmp_path / "ckpt", tmp_path / "out.safetensors")
    with safetensors.safe_open(out, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "extra_state": '{"_extra_state":7}'}


def test_export_into_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "ckpt", snapshot(1))
    with pytest.raises(CheckpointError, match=r"could not export to .*No such file"):
        checkpoint.export(tmp_path / "ckpt", tmp_path / "none" / "out.safetensors")
