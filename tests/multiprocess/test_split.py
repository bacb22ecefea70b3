# SPDX-License-Identifier: Apache-2.0
"""Streams in shards in real jobs, whose workers die and resume alone."""

import json
import re
from pathlib import Path

import pytest
from tests.multiprocess.test_dialects import BIN, finish, start

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(240)]

SCRIPT = str(Path(__file__).with_name("split.py"))
#: at the ends of what the workers agree on, 8 steps of 4 records, and near the end of an epoch
SYNC = ["1:28:after", "0:32:forward", "1:36:step", "0:60:after", "1:64:after", "0:88:step"]
ASYNC = ["1:28:after", "0:32:forward", "1:36:step", "1:104:after", "0:1032:step"]


def counts(folder: Path, *arguments: str, restarts: int = 0) -> list[float]:
    folder.mkdir()
    job = ["--server_num", "2", "--worker_num", "2", "--max_restarts", str(restarts), "--tee"]
    codes, text = finish([start([str(BIN / "fleetrun"), *job, SCRIPT, *arguments], cwd=folder)])
    assert codes == [0], text
    assert "restarting all processes" not in text
    assert text.count("of 2 was killed by SIGKILL") == max(0, len(arguments) - 3), text
    found = [json.loads(one) for one in re.findall(r"COUNTED (\[.*\])", text)]
    assert found[0] == found[1]
    one: list[float] = found[0]
    return one


def test_restarted_workers_agree_on_the_same_batches(tmp_path: Path) -> None:
    """The weight of a record depends on how many the other worker had in that step."""
    whole = counts(tmp_path / "whole", "--mode", "sync")
    assert min(whole) > 0
    assert counts(tmp_path / "killed", "--mode", "sync", "--die", *SYNC, restarts=9) == whole


def test_workers_that_step_alone_resume_in_their_shards(tmp_path: Path) -> None:
    killed = counts(tmp_path / "killed", "--mode", "async", "--die", *ASYNC, restarts=9)
    assert set(killed) == {2.0}
