# SPDX-License-Identifier: Apache-2.0
"""A small program that ends the processes of the job after fleetrun, even after SIGKILL.

Its standard input names the process groups that exist (`add 123`, `drop 123`). When fleetrun ends
in any way, the input closes. The program then kills the remaining groups, grandchildren included,
and removes the folder of its argument, which fleetrun could not. It is run by path, without site
packages, and imports almost nothing, so it starts within milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def keep(orders: Iterable[bytes]) -> set[int]:
    """Read all orders; return the groups that are left."""
    groups: set[int] = set()
    for order in orders:
        word, number = order.split()
        (groups.add if word == b"add" else groups.discard)(int(number))
    return groups


def kill(groups: Iterable[int]) -> None:
    """Kill all processes of each group."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # the group has ended, or another user's group has its number now


def remove(folder: str) -> None:
    """Remove a folder and the files in it."""
    try:
        for entry in os.scandir(folder):
            os.unlink(entry)
        os.rmdir(folder)
    except OSError:
        return  # fleetrun has removed it


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    kill(keep(sys.stdin.buffer))
    for given in sys.argv[1:]:
        remove(given)
