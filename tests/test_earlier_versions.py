# SPDX-License-Identifier: Apache-2.0
"""The files of the previous version load, and training resumes exactly."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
from tests.earlier.jobs import JOBS
from tests.earlier.write import HERE, run

#: torch does not promise to read an export of a newer version
NEEDS_TORCH = {"inference": (2, 13)}


def unpacked(name: str, folder: Path) -> list[float]:
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    numbers: list[float] = json.loads((folder / "numbers.json").read_text())
    return numbers


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", [job.__name__ for job in JOBS])
def test_training_resumes_from_files_of_the_previous_version(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    if here < NEEDS_TORCH.get(name, here):
        pytest.skip(f"it was exported by torch {NEEDS_TORCH[name]}, here is {torch.__version__}")
    numbers = unpacked(name, tmp_path)
    assert run("load", name, tmp_path / "saved") == pytest.approx(numbers, rel=1e-5)
    # that version named programs written by a method after classes
    said = "sparseembeddingbag_0" in capfd.readouterr().err
    assert said == (name == "static_net")
