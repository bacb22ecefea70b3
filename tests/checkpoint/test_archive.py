# SPDX-License-Identifier: Apache-2.0
"""The archive of a program contains no pickle, and loading refuses one."""

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from fleetlight.checkpoint.inference.archive import read_program, refuse_pickle, write_program
from fleetlight.checkpoint.storage.files import Sink
from fleetlight.errors import CheckpointError, CorruptCheckpointError


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
