# SPDX-License-Identifier: Apache-2.0
"""Retries a write while the disk is full."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fleetlight.errors import FleetError, JournalError
from fleetlight.observe.log import logger

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRY_EVERY_S = 0.5


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def is_full(error: Exception) -> bool:
    """True when the error, or its cause, is a full disk."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _FULL


def once_there_is_room(
    path: Path,
    act: Callable[[], T],
    patience_s: float,
    say: Callable[[str], None] = logger.warning,
    wait: Callable[[float], bool] = _wait,
) -> T:
    """Return `act()`, retried while the disk is full; a failed try must leave no trace.

    `wait` sleeps between tries, and returns True to allow only one more.
    """
    end, has_said = time.monotonic() + patience_s, False
    while True:
        try:
            found = act()
            break
        except (OSError, FleetError) as error:
            if not is_full(error) or time.monotonic() >= end:
                raise
            if not has_said:
                has_said = True
                say(
                    f"cannot write to {path}: {_why(error)}; trying again for {patience_s:g} s, "
                    "training waits"
                )
        if wait(_TRY_EVERY_S):
            end = -math.inf
    if has_said:
        say(f"{path}: there is room again")
    return found


def written(path: Path, act: Callable[[], T], patience_s: float) -> T:
    """Return `act()` like `once_there_is_room`, with an error for files that a process needs."""
    try:
        return once_there_is_room(path, act, patience_s)
    except OSError as error:
        raise JournalError(
            f"durability: {path} cannot be written: {_why(error)}; make room or repair the disk, "
            "or name another folder in strategy.durability_configs.folder"
        ) from error


def _why(error: Exception) -> str:
    """The reason in the words of the system."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or str(error)
