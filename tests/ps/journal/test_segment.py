# SPDX-License-Identifier: Apache-2.0
"""A file of a journal does not fill the system's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetlight.ps.journal import segment as segment_module
from fleetlight.ps.journal.segment import Segment


def test_what_is_on_the_disk_and_lies_behind_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "_KEPT_BYTES", 100)
    happened: list[tuple[int, ...]] = []
    synced, advised = os.fdatasync, os.posix_fadvise

    def sync(fd: int) -> None:
        happened.append(())
        synced(fd)

    def advise(fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        happened.append((offset, size))
        advised(fd, offset, size, advice)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    segment = Segment(tmp_path, 1)
    written = bytes(range(250))
    for part in (written[:90], written[90:220], written[220:]):
        segment.write([part])
        segment.sync()
    segment.close()
    assert happened == [(), (), (0, 120), (), (120, 30)]
    assert segment.path.read_bytes() == written
