# SPDX-License-Identifier: Apache-2.0
"""Reading loads only the requested files, and verifies their bytes."""

import dataclasses
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.checkpoint.states import snapshot, whole_step
from torch import nn

from fleetlight import checkpoint
from fleetlight.checkpoint.inference.archive import read_program, refuse_pickle, write_program
from fleetlight.checkpoint.storage.files import Sink
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


# -- the archive of a program contains no pickle, and loading refuses one -------------------------


class Model(nn.Module):
    """Holds a parameter, a buffer and a constant: the three kinds of tensors in an archive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(2))
        self.constant = torch.arange(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.constant + self.shift


@pytest.fixture
def path(tmp_path: Path) -> Path:
    program = torch.export.export(Model().eval(), (torch.randn(2, 3),))
    with Sink(tmp_path / "program.pt2") as sink:
        write_program(sink, program)
    return tmp_path / "program.pt2"


def rewritten(path: Path, ending: str, data: bytes) -> Path:
    """A copy of the archive with one member replaced or added."""
    copy = path.with_name("copy.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for member in old.namelist():
            if not member.endswith(ending):
                new.writestr(member, old.read(member))
        new.writestr(f"archive/{ending}", data)
    return copy


@pytest.mark.slow
def test_a_written_archive_has_no_pickle_and_loads(path: Path) -> None:
    refuse_pickle(path)
    assert read_program(path).module()(torch.ones(2, 3)).shape == (2, 2)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            # pickles of protocol 2 or later start like this; a saved tensor is a zip in a zip
            assert not archive.read(name).startswith((b"\x80\x02", b"PK")), name


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    "member",
    [
        "data/sample_inputs/model.pt",
        "data/weights/model.pt",
        "data/constants/model.pt",
        "data/aotinductor/model/code.so",
        "extra/note",
        "serialized_state_dict.json",
    ],
)
def test_members_that_may_run_code_are_refused(path: Path, member: str) -> None:
    with pytest.raises(CheckpointError, match=rf"copy.pt2 holds '{member}', which may be a pickle"):
        read_program(rewritten(path, member, pickle.dumps(print)))


@pytest.mark.parametrize("table", ["weights", "constants"])
def test_tensors_stored_as_pickles_are_refused(path: Path, table: str) -> None:
    entry = {"path_name": "opaque_obj_0", "use_pickle": True, "is_param": False}
    data = json.dumps({"config": {"layer.weight": entry}}).encode()
    with pytest.raises(CheckpointError, match=r"'layer\.weight' is stored as a pickle"):
        read_program(rewritten(path, f"data/{table}/model_{table}_config.json", data))


def test_pickles_not_marked_as_such_are_refused(path: Path) -> None:
    entry = {"path_name": "opaque_obj_0", "use_pickle": False, "is_param": False}
    data = json.dumps({"config": {"thing": entry}}).encode()
    with pytest.raises(CheckpointError, match="'thing' is stored as a pickle"):
        read_program(rewritten(path, "data/constants/model_constants_config.json", data))


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.pt2").write_bytes(b"garbage")
    with pytest.raises(CorruptCheckpointError, match=r"p.pt2 is not an exported program"):
        read_program(tmp_path / "p.pt2")
