# SPDX-License-Identifier: Apache-2.0
"""One process locks a folder; the errors of the others name it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from fleetlight.errors import JournalError
from fleetlight.ps.journal.locked_dir import lock_folder, refuse_if_in_use


def test_one_process_at_a_time_locks_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    lock = lock_folder(folder)
    expected = rf"in use by another process \(process {os.getpid()} on .+\); give"
    with pytest.raises(JournalError, match=expected):
        lock_folder(folder)
    with pytest.raises(JournalError, match=expected):
        refuse_if_in_use(folder)
    lock.release()
    refuse_if_in_use(folder)
    lock_folder(folder).release()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"cannot be used: .*; name another folder"):
        lock_folder(tmp_path / "file")


def test_a_file_system_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(JournalError, match=r"cannot be used: No locks available; name another"):
        lock_folder(tmp_path)
