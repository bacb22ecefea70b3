# SPDX-License-Identifier: Apache-2.0
"""One process holds a lock file; its forked children do not."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetlight.files.lock import NO_LOCKS, FileLock, holder_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@contextmanager
def forked() -> Iterator[None]:
    """A child that is forked before the block and exits after it."""
    (reads, ends), (ready, starts) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(starts, b"x")
        os.read(reads, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        yield
    finally:
        os.write(ends, b"x")
        assert os.waitpid(child, 0)[1] == 0
        for end in (reads, ends, ready, starts):
            os.close(end)


def test_one_lock_is_held_at_a_time(path: Path) -> None:
    assert holder_of(path) is None
    with FileLock(path) as one, FileLock(path) as other:
        assert holder_of(path) is None
        assert one.acquire()
        assert not other.acquire()
        signature = f"process {os.getpid()} on "
        assert other.holder().startswith(signature)
        assert (holder_of(path) or "").startswith(signature)
        one.release()
        assert holder_of(path) is None
        assert other.acquire()


def test_a_full_disk_does_not_prevent_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with FileLock(path) as one, FileLock(path) as other:
        assert one.acquire()
        assert not other.acquire()
        assert other.holder() == ""


def test_a_forked_child_does_not_keep_the_lock(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire()
    with forked():
        lock.release()
        with FileLock(path) as other:
            assert other.acquire()


def test_a_forked_child_does_not_release_the_lock(path: Path) -> None:
    with FileLock(path) as lock:
        assert lock.acquire()
        child = os.fork()
        if not child:
            lock.release()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert holder_of(path) is not None


def test_a_copy_of_the_descriptor_does_not_keep_the_lock(path: Path) -> None:
    # like a child between fork and exec
    with FileLock(path) as lock:
        assert lock.acquire()
        copy = os.dup(lock._fd)
    assert holder_of(path) is None
    os.close(copy)


def test_a_lock_is_released_once(path: Path) -> None:
    lock = FileLock(path)
    number = lock._fd
    lock.release()
    with path.open() as file:
        assert file.fileno() == number, "another file has the number now"
        lock.release()
        assert file.read() == ""


@pytest.mark.parametrize("number", NO_LOCKS)
def test_a_file_system_without_locks_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FileLock(path) as lock, pytest.raises(OSError, match=os.strerror(number)):
        lock.acquire()
    assert holder_of(path) is None
