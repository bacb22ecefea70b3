# SPDX-License-Identifier: Apache-2.0
"""A file of a journal does not fill the system's memory."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from fleetlight.ps.journal.fsync_marker import SyncedBytes
from fleetlight.ps.journal.segment import Segment


def test_pages_that_are_full_and_on_the_disk_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = mmap.PAGESIZE
    happened: list[tuple[int, ...]] = []
    synced, advised = os.fdatasync, os.posix_fadvise

    def sync(fd: int) -> None:
        happened.append(())
        synced(fd)

    def advise(fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        happened.append((offset, size))
        advised(fd, offset, size, advice)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    segment = Segment(tmp_path, 1)
    written = bytes(range(256)) * (page // 64)
    unsynced = []
    for part in (written[:90], written[90 : 2 * page + 90], written[2 * page + 90 : 4 * page]):
        segment.write([part])
        unsynced.append(segment.unsynced)
        segment.sync()
        assert segment.unsynced == 0
    segment.close()
    assert unsynced == [90, 2 * page, 2 * page - 90]
    assert happened == [(), (0, 0), (), (0, 2 * page), (), (2 * page, 2 * page)]
    assert segment.path.read_bytes() == written


def test_two_that_sync_at_a_time_do_not_hinder_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One knows of more than the other, which is done later."""
    segment, synced, amid = Segment(tmp_path, 1), os.fdatasync, threading.Event()
    segment.write([bytes(3 * mmap.PAGESIZE)])
    other = threading.Thread(target=segment.sync)

    def sync(fd: int) -> None:
        synced(fd)
        if not amid.is_set():
            amid.set()
            segment.write([bytes(3 * mmap.PAGESIZE)])
            other.start()
            # it may wait until this one is done
            other.join(0.2)

    monkeypatch.setattr(os, "fdatasync", sync)
    segment.sync()
    other.join()
    assert segment.unsynced == 0
    segment.close()
    # somebody who has come too late
    segment.sync()


def test_what_is_on_the_disk_is_written_down(tmp_path: Path) -> None:
    for first in (1, 5):
        segment = Segment(tmp_path, first)
        assert SyncedBytes.read(tmp_path) == SyncedBytes(first, 0, is_all_there=True)
        for size in (3, 6):
            segment.write([b"abc"])
            assert SyncedBytes.read(tmp_path).within(first) == size - 3
            segment.sync()
            assert SyncedBytes.read(tmp_path).within(first) == size
        assert SyncedBytes.read(tmp_path).within(first + 1) == 0
        segment.close()


def test_a_disk_that_refuses_that_word_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    segment = Segment(tmp_path, 1)
    monkeypatch.setattr(os, "pwrite", refuse)
    segment.write([b"abc"])
    segment.sync()
    segment.close()
    assert segment.unsynced == 0
    assert SyncedBytes.read(tmp_path).within(1) == 0
