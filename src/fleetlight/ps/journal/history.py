# SPDX-License-Identifier: Apache-2.0
"""Reads a journal back, file after file, and mends the end at which its writer died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import JournalError
from fleetlight.ps.journal.records import Gap, Reader, Record
from fleetlight.ps.journal.segment import cut, segments
from fleetlight.ps.transport.protocol import Codec

M = TypeVar("M")


def history(
    folder: Path, codec: Codec[M], first: int, say: Callable[[str], None]
) -> Iterator[Record[M]]:
    """The records from there on. What was torn at the very end is cut off; all else is an error."""
    files = [(start, path) for start, path in segments(folder) if start >= first]
    expected = first
    for start, path in files:
        if start != expected:
            raise JournalError(
                f"{folder}: records {expected} to {start - 1} are missing; restore the folder, or "
                "start anew from the newest checkpoint"
            )
        reader = Reader(codec, _mapped(path), start)
        for record in reader:
            expected = record.number + 1
            yield record
        if reader.gap is not None:
            _mend(path, reader.gap, path == files[-1][1], say)


def _mapped(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file; what is written into them stays in memory."""
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "c"))


def _mend(path: Path, gap: Gap, is_last: bool, say: Callable[[str], None]) -> None:
    if gap.followed_by is not None or not is_last:
        behind = "others" if gap.followed_by is None else f"record {gap.followed_by}"
        raise JournalError(
            f"{path} is damaged at byte {gap.at}: {gap.why}, and behind it lies {behind}; what was "
            "acknowledged is not all there any more. Restore the folder from a copy, or start anew "
            "from the newest checkpoint"
        )
    size = path.stat().st_size
    say(
        f"{path}: its last {size - gap.at} bytes are no whole record ({gap.why}); nobody was told "
        "that they were written, so they are cut off"
    )
    cut(path, gap.at)
