# SPDX-License-Identifier: Apache-2.0
"""FileTransfer: pieces of files in a temporary folder of a server."""

from __future__ import annotations

import numpy as np
import pytest

from fleetlight.errors import CheckpointError, ProtocolError
from fleetlight.ps.server.checkpoints.file_transfer import FileTransfer


def piece(text: bytes) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(text, np.uint8)


def test_pieces_make_a_file_and_a_file_gives_pieces() -> None:
    hands = FileTransfer(0)
    hands.put("a", 0, piece(b"abc"))
    for _ in range(2):  # the same piece twice does no harm
        hands.put("a", 3, piece(b"def"))
    hands.put("a", 6, piece(b""))
    assert (hands.folder / "a").read_bytes() == b"abcdef"
    assert [hands.take("a", at, 4).tobytes() for at in (0, 4, 8)] == [b"abcd", b"ef", b""]
    hands.clear()


def test_nothing_is_left_behind() -> None:
    hands = FileTransfer(3)
    folder = hands.folder
    hands.put("a", 0, piece(b"abc"))
    hands.clear()
    assert not folder.exists()
    hands.clear()
    assert hands.folder != folder
    hands.clear()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "..", "a/b", "a\0"])
def test_only_files_of_its_own(name: str) -> None:
    hands = FileTransfer(0)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        hands.take(name, 0, 1)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        hands.put(name, 0, piece(b"x"))
    hands.clear()


def test_a_file_that_is_not_there() -> None:
    hands = FileTransfer(2)
    with pytest.raises(CheckpointError, match=r"server 2 could not transfer t of .*No such file"):
        hands.take("t", 0, 1)
    hands.clear()


@pytest.mark.parametrize("offset", [-1, 4, 1 << 62, (1 << 64) - 1])
def test_a_piece_behind_a_hole_is_refused(offset: int) -> None:
    """A file of any size would be read as a whole by whoever saves or loads next."""
    hands = FileTransfer(0)
    hands.put("a", 0, piece(b"abc"))
    with pytest.raises(ProtocolError, match=f"at {offset}, expected an offset of 0 to 3"):
        hands.put("a", offset, piece(b"def"))
    assert (hands.folder / "a").stat().st_size == 3
    hands.clear()


def test_memory_is_taken_for_what_is_there() -> None:
    hands = FileTransfer(0)
    hands.put("a", 0, piece(b"abc"))
    assert hands.take("a", 1, (1 << 64) - 1).tobytes() == b"bc"
    assert hands.take("a", (1 << 64) - 1, 5).tobytes() == b""
    with pytest.raises(ProtocolError, match="expected numbers from 0"):
        hands.take("a", -1, 5)
    hands.clear()
