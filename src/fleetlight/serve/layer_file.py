# SPDX-License-Identifier: Apache-2.0
"""Files of a layer of rows, mapped by all processes of a machine that serve the table.

A file has a page with its sizes, the slots of an index, and rows as float32. It is not flushed to
the disk, so a file is valid only until the machine starts again.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import os
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import PublicationError
from fleetlight.kernels.rows import layered_rows
from fleetlight.kernels.rows.layered_rows import KNOWN, USED
from fleetlight.publication.row_file import Piece

_FORMAT = 1
_PAGE = mmap.PAGESIZE
_LARGE_PAGE = 2 << 20


class _Sizes(msgspec.Struct, frozen=True):
    """The first page of a file."""

    dim: int
    #: words of the index
    words: int
    #: rows with room
    room: int
    #: rows in use
    used: int
    #: ids with a row, and removed ids
    known: int
    #: the start of the machine in which the file was written
    boot: str = ""
    format: int = _FORMAT


@dataclasses.dataclass(frozen=True)
class Layer:
    """A mapped layer; nothing writes to it."""

    used: int
    known: int
    slots: NDArray[np.int64]
    rows: NDArray[np.float32]


class LayerWriter:
    """A layer while it is built; it begins empty, or as a copy of another layer.

    The index stays in memory until `finish`.
    """

    def __init__(
        self, path: Path, dim: int, more: int, load: float, copied: Layer | None = None
    ) -> None:
        """Make room for `more` ids; `load` is the maximum load factor of the index."""
        self._dim = dim
        used, known = (0, 0) if copied is None else (copied.used, copied.known)
        self._counters = np.array([used, known])
        words, room = layered_rows.words_for(known + more, load), used + more
        _allocate(path, _PAGE + 8 * words + 4 * dim * room)
        self._path = path
        mapped = np.memmap(path, np.uint8, "r+")
        self._rows = _parts(mapped, words, room * dim)[1]
        self._slots = np.zeros(words, np.int64)
        if copied is not None:
            if len(copied.slots) == words:
                self._slots[:] = copied.slots
            else:
                layered_rows.grow(copied.slots, self._slots)
            self._rows[: used * dim] = copied.rows[: used * dim]

    def add(self, piece: Piece) -> None:
        """Set the rows of a piece, or mark its removed ids."""
        removed = piece.removed.view(np.int8)
        layered_rows.upsert(piece.ids, removed, piece.rows, self._slots, self._rows, self._counters)

    @property
    def used(self) -> int:
        """How many rows are in use."""
        return int(self._counters[USED])

    def finish(self) -> None:
        """Write the sizes and the index.

        Large writes get large pages in the page cache, which lookups at random places need.
        """
        room = len(self._rows) // self._dim
        known = int(self._counters[KNOWN])
        sizes = _Sizes(self._dim, len(self._slots), room, self.used, known, _boot())
        head = msgspec.json.encode(sizes).ljust(_PAGE, b"\0")
        index = self._slots.view(np.uint8).data
        with self._path.open("r+b") as file:
            first = _LARGE_PAGE - _PAGE
            file.write(head + bytes(index[:first]))
            for start in range(first, len(index), _LARGE_PAGE):
                file.write(index[start : start + _LARGE_PAGE])


def open_layer(path: Path, dim: int) -> Layer | None:
    """Map a layer; None where there is none that was written since the machine started."""
    try:
        # copy-on-write, since kernels take writable arrays; nothing is written
        mapped = np.memmap(path, np.uint8, "c")
    except (FileNotFoundError, ValueError):  # an empty file remains of a power failure
        return None
    head = bytes(mapped[:_PAGE]).rstrip(b"\0")
    if not head:
        return None
    try:
        sizes = msgspec.json.decode(head, type=_Sizes)
    except msgspec.DecodeError as error:
        raise _damaged(path, str(error)) from error
    if sizes.boot != _boot():
        return None
    expected = _PAGE + 8 * sizes.words + 4 * sizes.dim * sizes.room
    if (sizes.format, sizes.dim, len(mapped)) != (_FORMAT, dim, expected):
        raise _damaged(path, f"it has {len(mapped)} bytes, and rows of {sizes.dim} numbers")
    layer = Layer(sizes.used, sizes.known, *_parts(mapped, sizes.words, sizes.room * dim))
    _touch(layer)
    return layer


@functools.cache
def _boot() -> str:
    """Another text after each start of the machine; "" where the system does not say it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _allocate(path: Path, size: int) -> None:
    """Reserve the blocks now: a full disk is an error here, and would be a signal later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _damaged(path: Path, why: str) -> PublicationError:
    return PublicationError(f"{path} is damaged: {why}; remove it, and a reader builds it again")


def _parts(
    mapped: NDArray[np.uint8], words: int, floats: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    whole, middle = mapped.view(np.ndarray), _PAGE + 8 * words
    return whole[_PAGE:middle].view(np.int64), whole[middle : middle + 4 * floats].view(np.float32)


def _touch(layer: Layer) -> None:
    """Enter all pages into the page table now, so that no lookup waits for it."""
    layer.slots[:: _PAGE // 8].sum()
    layer.rows[:: _PAGE // 4].sum()
