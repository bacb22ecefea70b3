# SPDX-License-Identifier: Apache-2.0
"""The benchmark of caches: what its claim says of one batch in each step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_way_to_train_is_measured() -> None:
    options = "--no-write --rounds 2 --steps 2 --batches 4 --models word2vec"
    command = [sys.executable, "-m", "benchmarks.device_cache", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    shares = {line[0].strip("| "): line[3] for line in lines if line[3].endswith("%")}
    assert shares.pop("sync, one batch in each step") == "0%"
    assert len(shares) == 3
    assert "0%" not in shares.values()
