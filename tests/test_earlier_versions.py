# SPDX-License-Identifier: Apache-2.0
"""What the version before has written is read, and training goes on as it would have there."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from tests.earlier.jobs import JOBS
from tests.earlier.write import HERE, run

#: torch itself does not promise to read what a newer one has exported
NEEDS_TORCH = {"inference": (2, 13)}


def unpacked(name: str, folder: Path) -> list[float]:
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    numbers: list[float] = json.loads((folder / "numbers.json").read_text())
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", [job.__name__ for job in JOBS])
def test_training_goes_on_where_the_version_before_has_saved(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    if here < NEEDS_TORCH.get(name, here):
        pytest.skip(f"it was exported by torch {NEEDS_TORCH[name]}, here is {torch.__version__}")
    numbers = unpacked(name, tmp_path)
    assert run("load", name, tmp_path / "saved") == pytest.approx(numbers, rel=1e-5)
    # a program that a model's method has written was named by classes then
    said = "sparseembeddingbag_0" in capfd.readouterr().err
    assert said == (name == "static_net")
