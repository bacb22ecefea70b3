# SPDX-License-Identifier: Apache-2.0
"""BlobStore: each blob is written once and kept while a commit may need it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetlight.errors import ComebackError, JournalError
from fleetlight.ps.worker.replay.worker_journal import BlobStore, clear_blobs


def data(value: int) -> Any:
    return np.full(100, value, np.uint8)


def names(folder: Path) -> set[str]:
    return {path.name.removeprefix("kept.") for path in folder.iterdir()}


def test_only_blobs_of_the_last_two_commits_are_kept(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 0.0)
    stored: list[str] = []
    for value in (1, 2, 2, 3, 4):
        number = store.next_point()
        stored.append(store.put(data(value)))
        store.committed(number)
        assert names(tmp_path) == set(stored[-2:])
        assert store.get(stored[-1]) == data(value).tobytes()
    assert stored[1] == stored[2]


def test_keep_retains_a_blob_without_writing_it(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 0.0)
    store.next_point()
    kept = store.put(data(1))
    for _ in range(4):
        number = store.next_point()
        assert store.keep(kept)
        store.committed(number)
        assert store.get(kept) == data(1).tobytes()
    for _ in range(2):
        store.committed(store.next_point())
    assert not store.keep(kept)
    assert names(tmp_path) == set()


def test_blobs_of_pending_commits_are_kept(tmp_path: Path) -> None:
    """Queued pushes may be merged, and only the last of them is committed."""
    store = BlobStore(tmp_path, 0.0)
    by_number = {}
    for value in range(1, 7):
        assert store.next_point() == value
        by_number[value] = store.put(data(value))
    store.committed(2)
    assert names(tmp_path) == set(by_number.values())
    store.committed(4)
    assert names(tmp_path) == {by_number[n] for n in (2, 3, 4, 5, 6)}
    store.committed(6)
    assert names(tmp_path) == {by_number[n] for n in (4, 5, 6)}


def test_a_restart_finds_the_blobs_of_its_commit(tmp_path: Path) -> None:
    first = BlobStore(tmp_path, 0.0)
    first.next_point()
    old, needed = first.put(data(1)), first.put(data(2))
    (tmp_path / "kept.new").write_bytes(b"died over it")
    second = BlobStore(tmp_path, 0.0, [needed])
    assert names(tmp_path) == {needed}
    assert second.get(needed) == data(2).tobytes()
    assert second.put(data(2)) == needed
    for value in (3, 4):
        number = second.next_point()
        second.put(data(value))
        assert needed in names(tmp_path)
        second.committed(number)
    assert not names(tmp_path) & {old, needed}
    clear_blobs(tmp_path)
    assert not names(tmp_path)


@pytest.mark.parametrize("damage", [b"", bytes(100), None])
def test_a_damaged_blob_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    store = BlobStore(tmp_path, 0.0)
    name = store.put(data(1))
    path = tmp_path / f"kept.{name}"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    with pytest.raises(ComebackError, match=f"kept.{name}: got {len(damage or b'')} bytes that"):
        store.get(name)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(JournalError, match=r"kept\.\w+\.new cannot be written: No space"):
        BlobStore(tmp_path, 0.0).put(data(1))
