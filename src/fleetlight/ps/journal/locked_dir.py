# SPDX-License-Identifier: Apache-2.0
"""A folder that one process locks, so that no other one writes there."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fleetlight.errors import JournalError
from fleetlight.files.lock import FileLock, holder_of

_LOCK = "lock"


def lock_folder(path: Path) -> FileLock:
    """Create the folder if necessary, and lock it until the lock is released."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / _LOCK, 0o600)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(lock.release)
            if not lock.acquire():
                raise _in_use(path, lock.holder())
            on_failure.pop_all()
    except OSError as error:
        raise JournalError(
            f"durability: {path} cannot be used: {error.strerror or error}; name another "
            "folder in strategy.durability_configs.folder"
        ) from error
    return lock


def refuse_if_in_use(path: Path) -> None:
    """Raise if another process has locked the folder; nothing in it changes."""
    holder = holder_of(path / _LOCK)
    if holder is not None:
        raise _in_use(path, holder)


def _in_use(path: Path, holder: str) -> JournalError:
    by = f" ({holder})" if holder else ""
    return JournalError(
        f"durability: {path} is in use by another process{by}; give each job a folder of its "
        "own in strategy.durability_configs.folder, or end the other process"
    )
