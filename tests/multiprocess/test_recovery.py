# SPDX-License-Identifier: Apache-2.0
"""Servers are killed while a job trains: it ends as if nothing had been."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import BIN, finish, start

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("outlive.py"))


def learnt(folder: Path, *arguments: str, restarts: int = 0) -> tuple[set[str], str]:
    """What the workers of a job with two servers have learnt, and all that was said."""
    folder.mkdir()
    job = ["--server_num", "2", "--worker_num", "2", "--max_restarts", str(restarts), "--tee"]
    command = [str(BIN / "fleetrun"), *job, SCRIPT, *arguments]
    codes, text = finish([start(command, cwd=folder)])
    assert codes == [0], text
    found = re.findall(r"LEARNT (\w+) ", text)
    assert len(found) == 2, text
    return set(found), text


def test_sync_learns_the_same_bits(tmp_path: Path) -> None:
    """Gradients are clipped over all servers, so that a step has two halves to die between."""
    unharmed, _ = learnt(tmp_path / "unharmed")
    killed, text = learnt(tmp_path / "killed", "--kill", "2", "5", "6", restarts=9)
    assert killed == unharmed
    assert len(unharmed) == 1
    for number, left in ((0, 8), (1, 7), (0, 6)):
        assert f"server {number} of 2 was killed by SIGKILL" in text
        assert f"{left} more left), the others go on" in text
