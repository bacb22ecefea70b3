# SPDX-License-Identifier: Apache-2.0
"""A saved inference model runs without its class and describes its inputs."""

import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.states import folders, full_disk_at, uninstall
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from fleetlight.checkpoint import load_inference, save_inference
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError


class Net(nn.Module):
    """Two inputs, a dropout and a batch norm that must be off, and a structured result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.drop(self.norm(x + self.embed(ids)))
        return {"logits": self.head(hidden), "top": self.head(hidden).argmax(1)}


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(3, -1, 2).sum(1)


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(7, (rows,), generator=generator)
    return {"x": torch.randn(rows, 4, generator=generator), "ids": ids}


def expected(net: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    net.eval()
    with torch.no_grad():
        return net(**inputs)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_exported_model_takes_any_batch_size(tmp_path: Path, rows: int, by_name: bool) -> None:
    net = Net()
    example = batch(rows)
    save_inference(tmp_path, net, example if by_name else tuple(example.values()))
    model = load_inference(tmp_path)
    for size in (1, 2, 3, 8):
        inputs = batch(size)
        for result in (model(**inputs), model(*inputs.values())):
            torch.testing.assert_close(result, expected(net, inputs))
            assert not result["logits"].requires_grad


def test_training_flags_and_parameters_are_unchanged(tmp_path: Path) -> None:
    net = Net()
    net.norm.eval()
    flags = [part.training for part in net.modules()]
    objects = [id(param) for param in net.parameters()]
    save_inference(tmp_path, net, batch(2))
    assert [part.training for part in net.modules()] == flags
    assert [id(param) for param in net.parameters()] == objects
    assert all(param.requires_grad for param in net.parameters())


def test_training_flags_are_restored_after_a_failure(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken on purpose")

    net = Broken()
    with pytest.raises(CheckpointError, match="Broken cannot be exported: broken on purpose"):
        save_inference(tmp_path, net, torch.ones(2))
    assert net.training
    assert folders(tmp_path) == []


@pytest.mark.slow
def test_a_model_with_a_fixed_batch_names_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fleetlight.checkpoint.inference.exported"):
        manifest = save_inference(tmp_path, FixedBatch(), torch.ones(6, 2))
    assert "FixedBatch: exported for the example's batch size only, because: " in caplog.text
    assert manifest.static_because
    model = load_inference(tmp_path)
    assert model.inputs[0].shape == (6, 2)
    assert model(torch.ones(6, 2)).tolist() == [[2, 2]] * 3
    with pytest.raises(ConfigError, match=r"'x': got float32\[3, 2\], expected float32\[6, 2\]"):
        model(torch.ones(3, 2))


def test_the_batch_size_is_fixed_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = save_inference(tmp_path, nn.Linear(2, 2), torch.ones(3, 2), dynamic_batch=False)
    assert manifest.static_because == "no batch dimension was asked for or found"
    assert manifest.inputs[0].shape == (3, 2)
    assert not [record for record in caplog.records if record.name.startswith("fleetlight")]


def test_an_input_may_be_excluded_from_the_batch(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x @ scale

    examples = {"x": torch.ones(2, 2), "scale": torch.eye(2)}
    save_inference(tmp_path, Scaled(), examples, dynamic_batch=["x"])
    model = load_inference(tmp_path)
    assert [entry.shape for entry in model.inputs] == [(None, 2), (2, 2)]
    assert model(torch.ones(5, 2), torch.eye(2)).shape == (5, 2)


def test_a_wrong_batch_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'inputs'.*did you mean 'input'"):
        save_inference(tmp_path, nn.Linear(2, 2), torch.ones(3, 2), dynamic_batch=["inputs"])
    with pytest.raises(ConfigError, match="'input' has no rows; expected at least one"):
        save_inference(tmp_path, nn.Linear(2, 2), torch.ones(0, 2))


def test_a_wrong_input_type_is_named(tmp_path: Path) -> None:
    save_inference(tmp_path, Net(), batch(2))
    with pytest.raises(ConfigError, match=r"'ids': got float32\[2\], expected int64\[batch\]"):
        load_inference(tmp_path)(torch.ones(2, 4), torch.ones(2))


def test_a_model_can_be_loaded_to_another_device(tmp_path: Path) -> None:
    save_inference(tmp_path, nn.Linear(2, 3), torch.ones(2, 2))
    result = load_inference(tmp_path, device="meta")(torch.ones(4, 2, device="meta"))
    assert (result.device.type, result.shape) == ("meta", (4, 3))
    with pytest.raises(ConfigError, match="input 'input' is on meta, expected it on cpu"):
        load_inference(tmp_path)(torch.ones(4, 2, device="meta"))


def test_the_archive_holds_no_examples(tmp_path: Path) -> None:
    save_inference(tmp_path, Net(), batch(2))
    with zipfile.ZipFile(tmp_path / "generation-000001" / "program.pt2") as archive:
        (examples,) = (i for i in archive.infolist() if i.filename.endswith("inputs/model.pt"))
    assert examples.file_size == 0


def test_weights_that_torch_would_pickle_are_refused(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(TwoTensor(torch.eye(2), torch.eye(2)))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    with pytest.raises(CheckpointError, match="'w' is stored as a pickle"):
        save_inference(tmp_path, Twice(), torch.ones(2, 2), dynamic_batch=False)
    assert folders(tmp_path) == []


@pytest.mark.multiprocess
def test_a_model_runs_without_its_class(tmp_path: Path) -> None:
    net = Net()
    save_inference(tmp_path, net, batch(2))
    script = (
        "import sys, torch; from fleetlight.checkpoint import load_inference\n"
        "model = load_inference(sys.argv[1])\n"
        "assert 'tests' not in sys.modules\n"
        "print(model(torch.ones(1, 4), torch.tensor([3]))['logits'].tolist())"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    inputs = {"x": torch.ones(1, 4), "ids": torch.tensor([3])}
    assert done.stdout.strip() == str(expected(net, inputs)["logits"].tolist())


def test_a_damaged_program_is_named(tmp_path: Path) -> None:
    save_inference(tmp_path, nn.Linear(2, 2), torch.ones(2, 2))
    path = tmp_path / "generation-000001" / "program.pt2"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"program.pt2 was changed .* got sha256"):
        load_inference(tmp_path)


def test_a_checkpoint_is_neither_overwritten_nor_loaded_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(
        '{"format":"fleetlight-checkpoint","version":1,"checksum":"","generation":1}'
    )
    with pytest.raises(CheckpointError, match="not the manifest of a fleetlight-inference"):
        save_inference(tmp_path, nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(CheckpointError, match="got format 'fleetlight-checkpoint', expected"):
        load_inference(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    save_inference(tmp_path, nn.Linear(2, 2), torch.ones(2, 2))
    yield tmp_path
    assert load_inference(tmp_path)(torch.ones(2, 2)).shape == (2, 2)


@pytest.mark.parametrize("call", [5, 7, 10])
def test_a_full_disk_keeps_the_process_and_the_old_model(
    saved: Path, watched_os: Any, call: int
) -> None:
    watched_os(full_disk_at(call))
    with pytest.raises(CheckpointError, match=r"No space left .*generation 1 there is intact"):
        save_inference(saved, nn.Linear(2, 2), torch.ones(2, 2))
    uninstall()
    assert folders(saved) == ["generation-000001", "manifest.json"]


def test_a_model_prints_its_inputs_and_outputs(tmp_path: Path) -> None:
    save_inference(tmp_path, Net(), batch(3))
    assert repr(load_inference(tmp_path)) == (
        "InferenceModel(x: float32[?, 4], ids: int64[?]) -> float32[?, 2], int64[?]"
    )
    save_inference(tmp_path, nn.Linear(2, 3), torch.ones(4, 2), dynamic_batch=False)
    assert repr(load_inference(tmp_path)).endswith("float32[4, 2]) -> float32[4, 3]")
