# SPDX-License-Identifier: Apache-2.0
"""The reaper, which kills process groups and removes folders."""

import pathlib
import subprocess
import sys

from fleetlight.launch.processes import child
from fleetlight.launch.processes.child import keep, kill


def test_reaper_keeps_added_groups() -> None:
    assert keep([b"add 5\n", b"add 6\n", b"drop 5\n", b"drop 9\n"]) == {6}


def test_ended_group_is_no_error() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    kill([process.pid])


def test_reaper_removes_the_folder(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "error.0").write_text("{}")
    program = [sys.executable, "-I", "-S", child.__file__]
    for _ in range(2):  # the second time the folder does not exist
        subprocess.run([*program, str(folder)], input=b"", timeout=60, check=True)
        assert not folder.exists()
    subprocess.run(program, input=b"", timeout=60, check=True)
    assert tmp_path.exists()


def test_reaper_kills_the_groups_when_the_pipe_closes() -> None:
    stay, go = (
        subprocess.Popen(["sleep", "60"], start_new_session=True),
        subprocess.Popen(["sleep", "60"], start_new_session=True),
    )
    orders = f"add {stay.pid}\nadd {go.pid}\ndrop {stay.pid}\n"
    subprocess.run(
        [sys.executable, "-I", "-S", child.__file__], input=orders.encode(), timeout=60, check=True
    )
    assert go.wait(timeout=60) == -9
    assert stay.poll() is None
    stay.kill()
    stay.wait(timeout=60)
