# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a GPU, as far as it runs without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


def test_its_options_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--help"])
    assert ended.value.code == 0
    assert "--device {cuda,cpu}" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith("sees no GPU; nothing was measured")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_all_sections_are_measured() -> None:
    options = "--device cpu --no-write --size 0.001 --rounds 2 --steps 2 --batches 2"
    command = [sys.executable, "-m", "benchmarks.gpu", *options.split(), "--models", "wide_deep"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for part in (
        "gather, index copied first",
        "topk",
        "found on the device",
        "rows on a server / plain torch",
    ):
        assert part in done.stdout
