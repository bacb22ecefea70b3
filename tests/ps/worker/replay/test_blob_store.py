# SPDX-License-Identifier: Apache-2.0
"""Shelf: each thing is written once, and stays as long as a commit may ask for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetlight.errors import ComebackError, JournalError
from fleetlight.ps.worker.replay.blob_store import BlobStore, clear


def data(value: int) -> Any:
    return np.full(100, value, np.uint8)


def names(folder: Path) -> set[str]:
    return {path.name.removeprefix("kept.") for path in folder.iterdir()}


def test_what_two_commits_need_stays_and_nothing_else(tmp_path: Path) -> None:
    shelf = BlobStore(tmp_path, 0.0)
    put: list[str] = []
    for value in (1, 2, 2, 3, 4):
        moment = shelf.next_moment()
        put.append(shelf.put(data(value)))
        shelf.committed(moment)
        assert names(tmp_path) == set(put[-2:])
        assert shelf.get(put[-1]) == data(value).tobytes()
    assert put[1] == put[2]


def test_what_is_needed_still_is_not_put_again(tmp_path: Path) -> None:
    shelf = BlobStore(tmp_path, 0.0)
    shelf.next_moment()
    kept = shelf.put(data(1))
    for _ in range(4):
        moment = shelf.next_moment()
        assert shelf.keep(kept)
        shelf.committed(moment)
        assert shelf.get(kept) == data(1).tobytes()
    for _ in range(2):
        shelf.committed(shelf.next_moment())
    assert not shelf.keep(kept)
    assert names(tmp_path) == set()


def test_what_is_on_its_way_to_a_commit_stays(tmp_path: Path) -> None:
    """Pushes wait in a queue; some are merged, and only the last of these is committed."""
    shelf = BlobStore(tmp_path, 0.0)
    put = {}
    for value in range(1, 7):
        assert shelf.next_moment() == value
        put[value] = shelf.put(data(value))
    shelf.committed(2)
    assert names(tmp_path) == set(put.values())
    shelf.committed(4)
    assert names(tmp_path) == {put[n] for n in (2, 3, 4, 5, 6)}
    shelf.committed(6)
    assert names(tmp_path) == {put[n] for n in (4, 5, 6)}


def test_a_later_life_finds_what_its_commit_needs(tmp_path: Path) -> None:
    first = BlobStore(tmp_path, 0.0)
    first.next_moment()
    old, needed = first.put(data(1)), first.put(data(2))
    (tmp_path / "kept.new").write_bytes(b"died over it")
    second = BlobStore(tmp_path, 0.0, [needed])
    assert names(tmp_path) == {needed}
    assert second.get(needed) == data(2).tobytes()
    assert second.put(data(2)) == needed
    for value in (3, 4):
        moment = second.next_moment()
        second.put(data(value))
        assert needed in names(tmp_path)
        second.committed(moment)
    assert not names(tmp_path) & {old, needed}
    clear(tmp_path)
    assert not names(tmp_path)


@pytest.mark.parametrize("damage", [b"", bytes(100), None])
def test_what_is_damaged_is_not_taken(tmp_path: Path, damage: bytes | None) -> None:
    shelf = BlobStore(tmp_path, 0.0)
    name = shelf.put(data(1))
    path = tmp_path / f"kept.{name}"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    with pytest.raises(ComebackError, match=f"kept.{name}: got {len(damage or b'')} bytes that"):
        shelf.get(name)


def test_a_disk_that_stays_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(JournalError, match=r"kept\.\w+\.new cannot be written: No space"):
        BlobStore(tmp_path, 0.0).put(data(1))
