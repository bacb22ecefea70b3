# SPDX-License-Identifier: Apache-2.0
"""FileTransfer: chunks of files in a temporary folder of a server."""

from __future__ import annotations

import numpy as np
import pytest

from fleetlight.errors import CheckpointError, ProtocolError
from fleetlight.ps.server.checkpoints.checkpoint_handler import FileTransfer


def chunk(text: bytes) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(text, np.uint8)


def test_files_are_written_and_read_in_chunks() -> None:
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    for _ in range(2):  # a repeated chunk does no harm
        transfer.put("a", 3, chunk(b"def"))
    transfer.put("a", 6, chunk(b""))
    assert (transfer.folder / "a").read_bytes() == b"abcdef"
    assert [transfer.take("a", at, 4).tobytes() for at in (0, 4, 8)] == [b"abcd", b"ef", b""]
    transfer.clear()


def test_clear_removes_the_folder() -> None:
    transfer = FileTransfer(3)
    folder = transfer.folder
    transfer.put("a", 0, chunk(b"abc"))
    transfer.clear()
    assert not folder.exists()
    transfer.clear()
    assert transfer.folder != folder
    transfer.clear()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "..", "a/b", "a\0"])
def test_only_plain_file_names_are_accepted(name: str) -> None:
    transfer = FileTransfer(0)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        transfer.take(name, 0, 1)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        transfer.put(name, 0, chunk(b"x"))
    transfer.clear()


def test_a_missing_file_is_an_error() -> None:
    transfer = FileTransfer(2)
    with pytest.raises(CheckpointError, match=r"server 2 could not transfer t of .*No such file"):
        transfer.take("t", 0, 1)
    transfer.clear()


@pytest.mark.parametrize("offset", [-1, 4, 1 << 62, (1 << 64) - 1])
def test_a_chunk_after_a_gap_is_refused(offset: int) -> None:
    """A sparse file of any size would be read whole by the next save or load."""
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    with pytest.raises(ProtocolError, match=f"at {offset}, expected an offset of 0 to 3"):
        transfer.put("a", offset, chunk(b"def"))
    assert (transfer.folder / "a").stat().st_size == 3
    transfer.clear()


def test_a_read_allocates_only_what_the_file_has() -> None:
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    assert transfer.take("a", 1, (1 << 64) - 1).tobytes() == b"bc"
    assert transfer.take("a", (1 << 64) - 1, 5).tobytes() == b""
    with pytest.raises(ProtocolError, match="expected numbers from 0"):
        transfer.take("a", -1, 5)
    transfer.clear()
