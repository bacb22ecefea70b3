# SPDX-License-Identifier: Apache-2.0
"""Loading processes started by spawn, which run the script again."""

import re
from pathlib import Path

import pytest
from tests.launch.workplace import outcome
from tests.multiprocess.test_dialects import BIN, finish, start

from fleetlight.launch.exit_codes import PERMANENT

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).with_name("spawned.py"))


def run(folder: Path, flags: str, *arguments: str) -> tuple[int, str]:
    """The exit code and the output."""
    command = [str(BIN / "fleetrun"), *flags.split(), "--max_restarts", "3", "--tee", SCRIPT]
    codes, text = finish([start([*command, *arguments], cwd=folder)])
    return codes[0], text


@pytest.mark.long
def test_restarted_worker_starts_new_loading_processes(tmp_path: Path) -> None:
    code, text = run(tmp_path, "--server_num 2 --worker_num 2")
    assert code == 0, text
    assert "worker 1 of 2 was killed by SIGKILL" in text
    assert "restarting all processes" not in text
    assert re.findall(r"COUNTED (.*)", text) == ["2 to 2"] * 2, text


@pytest.mark.parametrize("how", ["--spawn", "--forkserver"])
def test_script_without_a_main_guard_gets_one_error(tmp_path: Path, how: str) -> None:
    """One error for the script, without restarts and without an error of the loading process."""
    code, text = run(tmp_path, "--server_num 1 --worker_num 1", "--unguarded", how)
    assert code == PERMANENT, text
    assert "restarting all processes" not in text, text
    last = outcome(text)
    assert "ConfigError: fleet.init was called in a process that a worker has started" in last, text
    assert 'under if __name__ == "__main__":' in last, text
