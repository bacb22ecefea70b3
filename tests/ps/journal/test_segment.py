# SPDX-License-Identifier: Apache-2.0
"""Segment: sync, the page cache, and the fsync marker of a journal file."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from fleetlight.ps.journal.fsync_marker import SyncedBytes
from fleetlight.ps.journal.segment import Segment

pytestmark = pytest.mark.durable


def test_full_synced_pages_leave_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = mmap.PAGESIZE
    calls: list[tuple[int, ...]] = []
    fdatasync, posix_fadvise = os.fdatasync, os.posix_fadvise

    def sync(fd: int) -> None:
        calls.append(())
        fdatasync(fd)

    def advise(fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((offset, size))
        posix_fadvise(fd, offset, size, advice)

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
    assert calls == [(), (0, 0), (), (0, 2 * page), (), (2 * page, 2 * page)]
    assert segment.path.read_bytes() == written


def test_concurrent_syncs_do_not_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync that finishes later covers less data."""
    segment, fdatasync, syncing = Segment(tmp_path, 1), os.fdatasync, threading.Event()
    segment.write([bytes(3 * mmap.PAGESIZE)])
    second = threading.Thread(target=segment.sync)

    def sync(fd: int) -> None:
        fdatasync(fd)
        if not syncing.is_set():
            syncing.set()
            segment.write([bytes(3 * mmap.PAGESIZE)])
            second.start()
            # it may wait until this sync is done
            second.join(0.2)

    monkeypatch.setattr(os, "fdatasync", sync)
    segment.sync()
    second.join()
    assert segment.unsynced == 0
    segment.close()
    # a sync after close does nothing
    segment.sync()


def test_the_fsync_marker_follows_each_sync(tmp_path: Path) -> None:
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


def test_a_failed_fsync_marker_does_not_fail_the_sync(
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
