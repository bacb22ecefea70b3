# SPDX-License-Identifier: Apache-2.0
"""The log folder of one run."""

import os
import pathlib

import pytest

from fleetlight.errors import LaunchError
from fleetlight.launch.job.layout import JobLayout, JobProcess, Node
from fleetlight.launch.processes.logs import FileFollower, claim, tail
from fleetlight.roles.role import Kind

WORKER = JobProcess(kind=Kind.WORKER, index=0, of=1, local_rank=0, local_size=1)
LAYOUT = JobLayout(nodes=(Node(host="h", workers=(("h", 1),), servers=(("h", 2),), master_port=3),))


def write(path: pathlib.Path, name: str, text: str = "old\n") -> None:
    path.mkdir(exist_ok=True)
    (path / name).write_text(text)


def test_only_logs_of_an_earlier_run_move_away(tmp_path: pathlib.Path) -> None:
    logs = tmp_path / "log"
    for name in ("workerlog.0", "serverlog.1", "endpoints.log", "launcher.h.7.json", "notes.txt"):
        write(logs, name)
    folder = claim(str(logs), "a")
    assert folder.moved_to is not None
    assert folder.moved_to.parent == logs / "old"
    moved = sorted(entry.name for entry in folder.moved_to.iterdir())
    assert moved == ["endpoints.log", "launcher.h.7.json", "serverlog.1", "workerlog.0"]
    assert (logs / "notes.txt").exists()
    folder.close()


def test_two_runs_of_one_second_do_not_mix(tmp_path: pathlib.Path) -> None:
    logs = tmp_path / "log"
    moved = set()
    for _ in range(3):
        write(logs, "workerlog.0")
        os.utime(logs / "workerlog.0", (1e9, 1e9))
        folder = claim(str(logs), "a")
        moved.add(folder.moved_to)
        folder.close()
    assert len(moved) == 3


def test_folder_in_use_is_not_claimed(tmp_path: pathlib.Path) -> None:
    first = claim(str(tmp_path / "log"), "a")
    second = claim(str(tmp_path / "log"), "b")
    assert (first.path.name, second.path.name) == ("log", "log-2")
    first.close()
    third = claim(str(tmp_path / "log"), "c")
    assert third.path == first.path
    second.close()
    third.close()


def test_launchers_of_one_job_share_a_folder(tmp_path: pathlib.Path) -> None:
    first = claim(str(tmp_path / "log"), "a")
    first.write_endpoints("a", LAYOUT)
    os.close(first.open(WORKER, restart=0))
    second = claim(str(tmp_path / "log"), "a")
    assert second.path == first.path
    assert (second.is_shared, second.moved_to) == (True, None)
    assert first.file(WORKER).exists()
    first.close()


def test_endpoints_are_logged(tmp_path: pathlib.Path) -> None:
    folder = claim(str(tmp_path / "log"), "a")
    folder.write_endpoints("a", LAYOUT)
    text = (folder.path / "endpoints.log").read_text()
    assert text == "job a\nnode 0 h\nserver 0 h:2\nworker 0 h:1\n"
    folder.close()


def test_restart_is_marked(tmp_path: pathlib.Path) -> None:
    folder = claim(str(tmp_path / "log"), "a")
    for restart in (0, 1):
        descriptor = folder.open(WORKER, restart)
        os.write(descriptor, b"run\n")
        os.close(descriptor)
    assert folder.file(WORKER).read_text() == "run\n--- restart 1 ---\nrun\n"
    folder.close()


def test_folder_that_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot write logs to .*; make it writable or pass"):
        claim(str(tmp_path / "file" / "log"), "a")


def test_follower_shows_all_new_output(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"before\n")
    shown: list[bytes] = []
    follower = FileFollower(file, shown.append)
    follower.pump()
    with file.open("ab") as writer:
        writer.write(b"one\n")
        writer.flush()
        follower.pump()
        writer.write(b"x" * 3_000_000)
    follower.close()
    assert b"".join(shown) == b"one\n" + b"x" * 3_000_000


def test_tail_of_a_log(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"a" * 100 + b"\xffend")
    assert tail(file, 4) == b"\xffend"
    assert tail(tmp_path / "none") == b""
