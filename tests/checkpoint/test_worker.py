# SPDX-License-Identifier: Apache-2.0
"""The state of a worker, as bytes and as files."""

from pathlib import Path

import pytest
import torch

from fleetlight.checkpoint.formats.tensors import read_tensors
from fleetlight.checkpoint.state.rng import rng_state
from fleetlight.checkpoint.state.worker import WorkerState, read_worker, write_worker
from fleetlight.checkpoint.storage.generations import new_generation
from fleetlight.errors import CheckpointError, CorruptCheckpointError


def state() -> WorkerState:
    return WorkerState(
        rank=3,
        rng=rng_state(),
        values={
            "sampler": {"epoch": 2, "position": 2**40, "order": (1, 2)},
            "scaler": {"scale": 65536.0, "_growth_tracker": 3, "peak": torch.tensor(2.0)},
        },
        tensors={"residual.w": torch.randn(4)},
    )


def assert_same(found: WorkerState, expected: WorkerState) -> None:
    assert (found.rank, found.rng) == (expected.rank, expected.rng)
    assert found.values["sampler"] == expected.values["sampler"]
    assert found.values["scaler"]["peak"].item() == 2
    assert set(found.tensors) == {"residual.w"}
    assert torch.equal(found.tensors["residual.w"], expected.tensors["residual.w"])


def test_state_survives_as_bytes() -> None:
    expected = state()
    assert_same(WorkerState.from_bytes(expected.to_bytes()), expected)


def test_state_survives_as_files(tmp_path: Path) -> None:
    expected = state()
    with new_generation(tmp_path, "f") as generation:
        entries = write_worker(generation, expected)
        tensors = read_tensors(generation.path / "worker-00003.safetensors")
        assert_same(read_worker(generation.path / "worker-00003.json", tensors), expected)
    assert {entry.kind for entry in entries} == {"worker"}


def test_a_worker_without_tensors_has_one_file(tmp_path: Path) -> None:
    with new_generation(tmp_path, "f") as generation:
        assert write_worker(generation, WorkerState(rank=0)) == []
        assert [entry.name for entry in generation.files] == ["worker-00000.json"]


def test_an_unsupported_value_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"worker 1 values\.sampler\.fn cannot be saved"):
        WorkerState(rank=1, values={"sampler": {"fn": print}}).to_bytes()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "worker-00000.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"worker-00000.json is damaged"):
        read_worker(tmp_path / "worker-00000.json", {})
