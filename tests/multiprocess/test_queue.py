# SPDX-License-Identifier: Apache-2.0
"""A shard queue in real jobs with a slow or a dying worker."""

import itertools
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import BIN, finish, start

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).with_name("dealt.py"))


def read(folder: Path, worker: int, epoch: int) -> list[list[int]]:
    """The batches of a worker."""
    path = folder / f"read.{worker}.{epoch}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(record) for record in line.split()] for line in lines]


def run(folder: Path, *arguments: str, restarts: int = 0) -> str:
    job = ["--server_num", "2", "--worker_num", "2", "--max_restarts", str(restarts), "--tee"]
    codes, text = finish([start([str(BIN / "fleetrun"), *job, SCRIPT, *arguments], cwd=folder)])
    assert codes == [0], text
    # each of two epochs reads each record once
    assert text.count("COUNTED 2 to 2") == 2, text
    return text


def test_slow_worker_reads_fewer_records_and_each_is_read_once(tmp_path: Path) -> None:
    run(tmp_path)
    for epoch in range(2):
        slow, fast = read(tmp_path, 0, epoch), read(tmp_path, 1, epoch)
        assert sorted(itertools.chain(*slow, *fast)) == list(range(240))
        assert len(slow) == 4


def test_restarted_worker_resumes_its_own_ranges(tmp_path: Path) -> None:
    """Before, within and after a step, and between two epochs."""
    moments = ["1:4:forward", "1:8:step", "1:12:after", "0:0:epoch", "1:244:step"]
    text = run(tmp_path, "--die", *moments, restarts=9)
    assert text.count("of 2 was killed by SIGKILL") == 5, text
    assert "restarting all processes" not in text
