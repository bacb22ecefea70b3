# SPDX-License-Identifier: Apache-2.0
"""The error of one worker ends the job, and the last line names it."""

from pathlib import Path

import pytest
from tests.launch.workplace import outcome
from tests.multiprocess.test_dialects import BIN, SCRIPT, finish, start

from fleetlight.launch.exit_codes import PEER_FAILED

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("accident", "code", "parts"),
    [
        ("raise", 1, ["worker 1 of 2", "ValueError: on purpose", "workerlog.1"]),
        ("exit", 3, ["worker 1 of 2", "exited with code 3", "workerlog.1"]),
        ("kill", 137, ["worker 1 of 2", "killed by SIGKILL (often: out of memory)"]),
    ],
)
def test_the_first_failure_is_reported(
    tmp_path: Path, accident: str, code: int, parts: list[str]
) -> None:
    command = [str(BIN / "fleetrun"), "--nproc_per_node", "2", SCRIPT, accident]
    codes, text = finish([start(command, cwd=tmp_path)])
    assert codes == [code], text
    last = outcome(text)
    assert all(part in last for part in parts), last


def test_suspended_worker_is_named_at_the_deadline(tmp_path: Path) -> None:
    command = [str(BIN / "fleetrun"), "--nproc_per_node", "2", SCRIPT, "stop"]
    codes, text = finish([start(command, {"FLEET_DEADLINE_S": "10"}, cwd=tmp_path)])
    assert codes == [PEER_FAILED], text
    last = outcome(text)
    assert "worker 1" in last, text
    assert "has been silent for" in last, text
