# SPDX-License-Identifier: Apache-2.0
"""A tiny program that outlives fleetrun by a moment and leaves no process of the job behind.

It is told on its standard input which process groups exist (`add 123`, `drop 123`). When the other
end is closed, in whatever way fleetrun ended, it kills the groups still listed, grandchildren
included, and removes the folder it was started with, in case fleetrun could not. It is run by path,
without site packages, and imports almost nothing, so it is there within milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def keep(orders: Iterable[bytes]) -> set[int]:
    """Follow the orders to their end; the groups that are left."""
    groups: set[int] = set()
    for order in orders:
        word, number = order.split()
        (groups.add if word == b"add" else groups.discard)(int(number))
    return groups


def kill(groups: Iterable[int]) -> None:
    """End every group at once."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # already gone, or its number belongs to somebody else by now


def remove(folder: str) -> None:
    """A flat folder of small files, and what is in it."""
    try:
        for entry in os.scandir(folder):
            os.unlink(entry)
        os.rmdir(folder)
    except OSError:
        return  # fleetrun has done it itself


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    kill(keep(sys.stdin.buffer))
    for given in sys.argv[1:]:
        remove(given)
