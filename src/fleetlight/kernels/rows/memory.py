# SPDX-License-Identifier: Apache-2.0
"""Zeroed memory for tables: huge pages for large arrays, and reservations of address space.

On 4 KiB pages, a random access to a large table misses the cache twice: for the data and for the
page table. Only the touched part of an array counts as used memory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_log = logging.getLogger(__name__)
#: smaller arrays stay on ordinary pages, so that a hundred small tables stay small
HUGE_PAGES_FROM = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
#: MAP_NORESERVE of Linux, which Python names from 3.13 on: untouched pages need no swap space
_NO_RESERVE = 0x4000
#: MADV_POPULATE_WRITE of madvise(2), from Linux 5.14 on
_POPULATE_WRITE = 23


def zeros(count: int, dtype: DTypeLike) -> NDArray[Any]:
    """An array of zeros that will be used in full, on huge pages if it is large."""
    size = count * np.dtype(dtype).itemsize
    if size < 2 * HUGE_PAGES_FROM:
        return np.zeros(count, dtype)
    return np.frombuffer(_mapped(size, _PRIVATE, 0), dtype, count)


def reserve(count: int, dtype: DTypeLike) -> NDArray[Any] | None:
    """An array of zeros that uses no memory until it is touched; None if the system refuses."""
    size = count * np.dtype(dtype).itemsize
    try:
        return np.frombuffer(_mapped(size, _PRIVATE | _NO_RESERVE, HUGE_PAGES_FROM), dtype, count)
    except (OSError, OverflowError, ValueError, MemoryError):
        return None


def worth_reserving() -> int:
    """More bytes than one table can ever use on this machine."""
    return 2 * int(os.sysconf("SC_PHYS_PAGES")) * mmap.PAGESIZE


def populate(array: NDArray[Any]) -> None:
    """Allocate the pages of reserved memory in advance.

    Concurrent writes are preserved, and other threads continue. A system without this call
    allocates each page at its first use.
    """
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise()(first, array.ctypes.data + array.nbytes - first, _POPULATE_WRITE)


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _mapped(size: int, flags: int, huge_from: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags)
    if size > huge_from:
        _request_huge_pages(memory, huge_from)
    return memory


def _request_huge_pages(memory: mmap.mmap, start: int) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        _log.debug("this system has no huge pages: a table of %d bytes has none", len(memory))
        return
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, start)
    except OSError as error:
        _log.debug("a table of %d bytes has no huge pages: %s", len(memory), error)
