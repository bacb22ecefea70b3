# SPDX-License-Identifier: Apache-2.0
"""RowLog: records in a file, whose space is used again."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetlight.errors import ConfigError, RowFileError
from fleetlight.ps.tables.tier import row_log
from fleetlight.ps.tables.tier.row_log import RowLog

WIDTH, SEGMENT = 3, 5
Records = NDArray[np.float32]


def log_in(folder: Path, patience_s: float = 0.0) -> RowLog:
    return RowLog(folder, "emb", WIDTH, 4 * WIDTH * SEGMENT, patience_s)


def records(first: int, count: int) -> Records:
    return np.arange(first, first + count, dtype=np.float32)[:, None] + np.zeros(WIDTH, np.float32)


def open_files(folder: Path) -> int:
    """The open files of this process in a folder."""
    found = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread may have closed it
            found += os.readlink(f"/proc/self/fd/{file}").startswith(str(folder))
    return found


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 2**32 - 1)), max_size=12))
def test_records_are_found_until_they_are_dropped(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    log, known, made = log_in(folder), dict[int, int](), 0
    for count, seed in calls:
        positions = log.append(records(made, count)).tolist()
        assert not set(positions) & set(known)
        known |= dict(zip(positions, range(made, made + count), strict=True))
        made += count
        random = np.random.default_rng(seed)
        asked = random.permutation(list(known)).astype(np.int64)
        assert log.read(asked)[:, 0].tolist() == [known[at] for at in asked.tolist()]
        gone = asked[: len(asked) // 2]
        log.free(gone)
        for at in gone.tolist():
            del known[at]
        while (sparse := log.sparse_positions()) is not None:
            live = np.array([at for at in sparse.tolist() if at in known], np.int64)
            assert len(live) < SEGMENT / 2
            values = [known.pop(at) for at in live.tolist()]
            known |= dict(zip(log.append(log.read(live)).tolist(), values, strict=True))
            log.free(live)
        assert log.nbytes <= 4 * WIDTH * (2 * max(1, len(known)) + 2 * 6 * SEGMENT + 13)
    assert os.listdir(folder) == []


def test_neighbours_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.append(records(0, 40))
    reads = []
    honest = os.preadv

    def counted(file: int, views: list[memoryview], offset: int) -> int:
        reads.append((offset, len(views[0])))
        return honest(file, views, offset)

    monkeypatch.setattr(os, "preadv", counted)
    wanted = np.array([9, 7, 30, 8, 30], np.int64)
    assert log.read(wanted)[:, 0].tolist() == [9, 7, 30, 8, 30]
    assert reads == [(7 * 12, 36), (30 * 12, 12), (30 * 12, 12)]


def test_the_file_ends_with_the_log(tmp_path: Path) -> None:
    log = log_in(tmp_path / "new" / "folder")
    assert open_files(tmp_path) == 0
    log.append(records(0, 1))
    assert open_files(tmp_path) == 1
    del log
    gc.collect()
    assert open_files(tmp_path) == 0


def test_a_write_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, full = log_in(tmp_path, patience_s=60.0), [2]
    honest = os.posix_fallocate

    def sometimes(file: int, offset: int, size: int) -> None:
        if full[0]:
            full[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", sometimes)
    monkeypatch.setattr("fleetlight.ps.journal.disk_full_retry._TRY_EVERY_S", 0.0)
    assert log.read(log.append(records(0, 12)).astype(np.int64))[:, 0].tolist() == [*range(12)]
    assert full == [0]


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.append(records(0, 3))

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(RowFileError, match=r"table 'emb'.*No space left.*table_folder"):
            log.append(records(50, 9))
    assert log.append(records(3, 9)).tolist() == [*range(3, 12)]
    assert log.read(np.arange(12))[:, 0].tolist() == [*range(12)]


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.append(records(0, 12))
    os.ftruncate(log._opened(), 12 * 7)
    with pytest.raises(RowFileError, match="it ends before byte 108"):
        log.read(np.array([8], np.int64))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RowFileError, match=r"cannot be written in .*file/rows"):
        log_in(tmp_path / "file" / "rows").append(records(0, 1))


def test_positions_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_log, "_MAX_RECORDS", 10)
    log = log_in(tmp_path)
    log.append(records(0, 10))
    with pytest.raises(ConfigError, match="its file has 10 records, the most; use more servers"):
        log.append(records(0, 1))


def test_expected_records_are_announced_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[int, int, int, int]] = []
    log = RowLog(tmp_path, "emb", 512)
    log.expect(np.array([3]))  # there is no file yet
    at = log.append(np.zeros((40, 512), np.float32))
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: announced.append(call))
    log.expect(at[[30, 0, 1, 31, 7]].astype(np.int64))
    assert announced == [
        (log._file, page * 4096, 4096, os.POSIX_FADV_WILLNEED) for page in (0, 3, 15)
    ]
