# SPDX-License-Identifier: Apache-2.0
"""Lets a server give memory back to the system once it is free.

glibc gives every thread a heap of its own, and after one large array it keeps as much on each heap
for the next. A server has a thread for each connection, and rarely two with large arrays at once.
"""

from __future__ import annotations

import contextlib
import ctypes

#: numbers of glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
#: Arrays from here on come from the system and go back to it; NumPy asks for huge pages from here
#: on, so that fresh memory is cheap.
LARGE_BYTES = 4 << 20


def give_back_freed() -> None:
    """One heap for all threads, and large arrays outside of it; nothing where malloc is another."""
    # no library to look into, or no such function in it
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * LARGE_BYTES)
