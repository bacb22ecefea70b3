# SPDX-License-Identifier: Apache-2.0
"""The processes of one machine, without anybody watching over them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest
from tests.launch.workplace import wait_until

from fleetlight.errors import LaunchError
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import Layout, Node
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.processes.child import Keeper
from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.logs import LogFolder, claim

HERE = "127.0.0.1"
NODE = Node(host=HERE, workers=((HERE, 1), (HERE, 2)), servers=((HERE, 3),), master_port=4)


class Paper:
    """A screen that keeps what was shown."""

    size = None

    def __init__(self) -> None:
        self.shown = b""

    def say(self, text: str) -> None:
        raise AssertionError("a gang does not speak")

    def show(self, data: bytes) -> None:
        self.shown += data


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[LogFolder]:
    logs = claim(str(tmp_path / "log"), "a")
    yield logs
    logs.close()


def gang(folder: LogFolder, screen: Paper, script: str, *, tee: bool = False) -> Gang:
    file = folder.path / "t.py"
    file.write_text(script)
    job = JobSpec(script=str(file), collective=False, tee=tee)
    run = Run(
        job=job, layout=Layout(nodes=(NODE,)), log_dir=str(folder.path), error_dir=str(folder.path)
    )
    with Keeper() as keeper:
        made = Gang(run, folder=folder, keeper=keeper, screen=screen, outside=os.environ)
        try:
            made.start()
            wait_until(lambda: len(made.exits()) == 3, "all to exit")
        finally:
            made.close()
    return made


SAY = "import os; print(os.environ['FLEET_ROLE'], os.environ['FLEET_INDEX'], end='')"


def test_the_last_words_of_worker_0_are_shown_without_any_pump(folder: LogFolder) -> None:
    screen = Paper()
    gang(folder, screen, SAY)
    assert screen.shown == b"worker 0"


def test_tee_shows_all_and_ends_open_lines(folder: LogFolder) -> None:
    screen = Paper()
    gang(folder, screen, SAY, tee=True)
    assert sorted(screen.shown.splitlines()) == [
        b"[server 0] server 0",
        b"[worker 0] worker 0",
        b"[worker 1] worker 1",
    ]


LEAVE = """
import json, os, sys
told = {"time": 5.5, "error": "E: x", "consequence": True}
with open(os.environ["FLEET_ERROR_FILE"], "w") as file:
    json.dump(told, file)
sys.exit(int(os.environ["FLEET_INDEX"]) + 1)
"""


def test_an_exit_knows_what_the_process_left(folder: LogFolder) -> None:
    exits = gang(folder, Paper(), LEAVE).exits()
    assert sorted((one.member.name, one.status) for one in exits) == [
        ("server 0", 1),
        ("worker 0", 1),
        ("worker 1", 2),
    ]
    assert {(one.at, one.error, one.consequence) for one in exits} == {(5.5, "E: x", True)}


def test_when_one_cannot_start_none_is_left(
    folder: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    spawn = Gang._spawn

    def fail_at_the_last(self: Gang, member: object, output: int) -> object:
        if len(started) == 2:
            raise LaunchError("no more processes")
        child = spawn(self, member, output)  # type: ignore[arg-type]
        started.append(child.pid)
        return child

    monkeypatch.setattr(Gang, "_spawn", fail_at_the_last)
    with pytest.raises(LaunchError, match="no more processes"):
        gang(folder, Paper(), "import time; time.sleep(600)")
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
