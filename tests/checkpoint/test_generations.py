# SPDX-License-Identifier: Apache-2.0
"""Failures during a save leave a complete checkpoint."""

import errno
import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.states import folders, full_disk_at, snapshot, uninstall, whole_step

from fleetlight import checkpoint
from fleetlight.checkpoint.storage import generations
from fleetlight.errors import CheckpointError, CorruptCheckpointError

ROOT = Path(__file__).parents[2]


def calls_of_a_save(root: Path, watched_os: Any) -> list[str]:
    """The calls of one save that change the disk."""
    calls: list[str] = []
    watched_os(lambda _, name, args: calls.append(name))
    checkpoint.write(root, snapshot(2))
    uninstall()
    return calls


def test_a_save_replaces_the_last_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, snapshot(step))
        assert whole_step(tmp_path) == step
    assert folders(tmp_path) == ["generation-000003", "manifest.json"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("generation-x", "202401", "000001"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.write(tmp_path, snapshot(1))
    checkpoint.write(tmp_path, snapshot(2))
    assert {"generation-x", "202401", "000001", "notes.txt"} < set(folders(tmp_path))


@pytest.mark.slow
def test_a_failure_at_any_call_leaves_a_complete_checkpoint(
    tmp_path: Path, watched_os: Any
) -> None:
    checkpoint.write(tmp_path / "dry", snapshot(1))
    calls = calls_of_a_save(tmp_path / "dry", watched_os)
    assert len(calls) > 20
    switch = calls.index("replace") + 1
    for call in range(1, len(calls) + 1):
        root = tmp_path / str(call)
        checkpoint.write(root, snapshot(1))
        watched_os(full_disk_at(call))
        with pytest.raises(CheckpointError):
            checkpoint.write(root, snapshot(2))
        uninstall()
        assert whole_step(root) == (1 if call <= switch else 2)
        checkpoint.write(root, snapshot(3))
        assert whole_step(root) == 3
        assert len(folders(root)) == 2


def test_a_full_disk_is_an_error_and_its_space_is_freed(tmp_path: Path, watched_os: Any) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    watched_os(full_disk_at(8))
    with pytest.raises(CheckpointError, match=r"No space left on device .*generation 1 .* intact"):
        checkpoint.write(tmp_path, snapshot(2))
    assert folders(tmp_path) == ["generation-000001", "manifest.json"]


@pytest.mark.durable
def test_everything_is_fsynced_before_the_manifest_moves(tmp_path: Path, watched_os: Any) -> None:
    log: list[str] = []

    def note(_: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync":
            log.append(os.path.basename(os.readlink(f"/proc/self/fd/{args[0]}")))
        elif name == "replace":
            log.append("MOVE")

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc to name what is flushed")
    watched_os(note)
    manifest = checkpoint.write(tmp_path / "new", snapshot(1))
    before, after = log[: log.index("MOVE")], log[log.index("MOVE") + 1 :]
    assert {entry.name for entry in manifest.files} < set(before)
    assert before[-2] == "generation-000001"
    assert before[-1].startswith(".manifest.json.")
    assert after == ["new"]
    assert tmp_path.name in before, "the new directory's own name is flushed, too"


@pytest.mark.gate
@pytest.mark.long
@pytest.mark.multiprocess
def test_kill_at_any_call_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from fleetlight import checkpoint
from tests.checkpoint.states import WatchedOs, folders, snapshot, whole_step, uninstall
from pathlib import Path

root, old, new = Path({str(tmp_path)!r}) / "ckpt", snapshot(1), snapshot(2)
call, finished, outcomes = 0, False, set()
while not finished:
    call += 1
    checkpoint.write(root, old)
    pid = os.fork()
    if pid == 0:
        def kill(number, name, args):
            if number == call:
                os.kill(os.getpid(), signal.SIGKILL)
        WatchedOs(kill).install()
        checkpoint.write(root, new)
        os._exit(0)
    finished = os.waitpid(pid, 0)[1] == 0
    outcomes.add(whole_step(root))
assert outcomes == {{1, 2}}, outcomes
assert call > 20, call
checkpoint.write(root, old)
assert len(folders(root)) == 2, folders(root)
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, watched_os: Any) -> None:
    def interrupt(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == 10:
            raise KeyboardInterrupt

    checkpoint.write(tmp_path, snapshot(1))
    watched_os(interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(tmp_path, snapshot(2))
    uninstall()
    assert folders(tmp_path) == ["generation-000001", "manifest.json"]
    assert whole_step(tmp_path) == 1


def test_leftovers_of_a_crash_are_removed_before_the_next_save(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    (tmp_path / "generation-000002").mkdir()
    (tmp_path / ".manifest.json.0123abcd.new").touch()
    with generations.new_generation(tmp_path, "fleetlight-checkpoint") as generation:
        assert folders(tmp_path) == ["generation-000001", "generation-000002", "manifest.json"]
        assert generation.number == 2


def test_leftovers_of_a_first_save_that_crashed_are_removed(tmp_path: Path) -> None:
    (tmp_path / "generation-000001").mkdir()
    (tmp_path / "generation-000001" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="a save that never finished"):
        checkpoint.read(tmp_path)
    checkpoint.write(tmp_path, snapshot(1))
    assert whole_step(tmp_path) == 1


@pytest.mark.parametrize("data", [b"\x00\xff\x00", b'{"form'], ids=["bytes", "half"])
def test_an_unreadable_manifest_is_reported_as_damaged(tmp_path: Path, data: bytes) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"is damaged .* Remove it to save here"):
        checkpoint.write(tmp_path, snapshot(2))
    assert (tmp_path / "generation-000001").exists()
    (tmp_path / "manifest.json").unlink()
    checkpoint.write(tmp_path, snapshot(3))
    assert whole_step(tmp_path) == 3


def test_a_damaged_manifest_keeps_its_files_until_it_is_replaced(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:200])
    with generations.new_generation(tmp_path, "fleetlight-checkpoint"):
        assert (tmp_path / "generation-000001").is_dir()
    assert (tmp_path / "generation-000001" / "model.safetensors").is_file()
    checkpoint.write(tmp_path, snapshot(2))
    assert whole_step(tmp_path) == 2


def test_a_manifest_of_others_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(CheckpointError, match="would destroy something else"):
        checkpoint.write(tmp_path, snapshot(1))
    assert (tmp_path / "manifest.json").read_text() == '{"name": "web app"}'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 128 KiB."""
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(root)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs to mount a small disk")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_a_really_full_disk_keeps_the_last_checkpoint(small_disk: Path) -> None:
    checkpoint.write(small_disk, snapshot(1))
    with pytest.raises(CheckpointError, match=r"No space left .* generation 1 there is intact"):
        checkpoint.write(small_disk, snapshot(2, size=100_000))
    assert whole_step(small_disk) == 1
    checkpoint.write(small_disk, snapshot(3))
    assert whole_step(small_disk) == 3


def test_a_read_only_disk_keeps_the_last_checkpoint(small_disk: Path) -> None:
    checkpoint.write(small_disk, snapshot(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"Read-only file system .* generation 1 .* intact"):
        checkpoint.write(small_disk, snapshot(2))
    assert whole_step(small_disk) == 1


def test_a_file_size_limit_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large .* generation 1 .* intact"):
            checkpoint.write(tmp_path, snapshot(2, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert whole_step(tmp_path) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"Permission denied .* no checkpoint there"):
        checkpoint.write(tmp_path / "ckpt", snapshot(1))
    tmp_path.chmod(0o700)


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(CheckpointError, match="file is a file; expected a directory"):
        checkpoint.write(path, snapshot(1))
    with pytest.raises(CheckpointError, match="file: is a file; expected the directory"):
        checkpoint.read(path)
    with pytest.raises(CheckpointError, match=r"Not a directory .* no checkpoint there") as caught:
        checkpoint.write(path / "below", snapshot(1))
    # the text has the message of the system, so the chained error is hidden
    assert caught.value.__suppress_context__


def test_a_second_saver_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    with generations.new_generation(tmp_path, "f") as generation:
        expected = f"process {os.getpid()} on .* is saving into this directory right now"
        with pytest.raises(CheckpointError, match=expected):
            checkpoint.write(tmp_path, snapshot(1))
        assert generation.path.is_dir()
    checkpoint.write(tmp_path, snapshot(2))
    assert whole_step(tmp_path) == 2


def test_a_forked_loading_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    with generations.new_generation(tmp_path, "f"):
        (lock,) = (fd for fd in open_files() if open_files()[fd].endswith(".lock"))
        inherited = os.dup(lock)
    checkpoint.write(tmp_path, snapshot(1))
    os.close(inherited)


def open_files() -> dict[int, str]:
    """The open files of this process, by descriptor."""
    root = Path("/proc/self/fd")
    if not root.exists():
        pytest.skip("needs /proc to find the lock")
    links = ((int(path.name), path) for path in root.iterdir())
    return {fd: os.readlink(path) for fd, path in links if path.is_symlink()}


@pytest.mark.multiprocess
def test_the_lock_of_a_killed_saver_is_released(tmp_path: Path) -> None:
    script = (
        "import sys; from fleetlight.checkpoint.storage import generations\n"
        "with generations.new_generation(sys.argv[1], 'fleetlight-checkpoint'):\n"
        "    print('saving', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as saver:
        assert saver.stdout is not None
        assert saver.stdout.readline() == b"saving\n"
        with pytest.raises(CheckpointError, match=f"process {saver.pid} on "):
            checkpoint.write(tmp_path, snapshot(1))
        saver.send_signal(signal.SIGKILL)
        saver.wait(30)
    checkpoint.write(tmp_path, snapshot(2))
    assert whole_step(tmp_path) == 2
    assert folders(tmp_path) == ["generation-000001", "manifest.json"]


def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, logger="fleetlight.checkpoint.storage.generations"):
        checkpoint.write(tmp_path, snapshot(1))
    assert "has no locks; let only one job save here" in caplog.text
    assert whole_step(tmp_path) == 1


def test_reading_a_replaced_generation_is_an_error(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    found = checkpoint.read(tmp_path)
    checkpoint.write(tmp_path, snapshot(2))
    with pytest.raises(CheckpointError, match=r"generation 1 was replaced by 2 .* read .* again"):
        found.model()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    (tmp_path / "generation-000001" / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{name} is missing"):
        checkpoint.read(tmp_path).verify()


def test_a_directory_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory; expected the directory"):
        checkpoint.read(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no manifest.json; expected"):
        checkpoint.read(tmp_path)
