# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint reads our files, and what it writes loads as any safetensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.checkpoint.states import snapshot

from fleetlight import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_torch_reads_our_files_and_writes_some_that_load(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "ckpt", snapshot(3))
    state = torch.nn.Linear(4, 2).state_dict()
    reader = dcp.HuggingFaceStorageReader(checkpoint.read(tmp_path / "ckpt").location)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert {float(tensor.unique()) for tensor in state.values()} == {3.0}
    out = tmp_path / "out"
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out)), no_dist=True)
    files = list(out.glob("*.safetensors"))
    assert [path.name for path in files] == ["model-00001-of-00001.safetensors"]
    again = torch.nn.Linear(4, 2)
    again.load_state_dict(load_file(files[0]))
    assert {float(tensor.unique()) for tensor in again.state_dict().values()} == {3.0}
