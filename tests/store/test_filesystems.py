# SPDX-License-Identifier: Apache-2.0
"""File systems of fsspec: what remains when a writer dies, and half-written files."""

from pathlib import Path
from typing import Any

import pytest

from fleetlight.errors import MissingObjectError, StoreError
from fleetlight.store.filesystems import FilesystemStore
from fleetlight.store.retries import Limits

pytest.importorskip("fsspec")


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return FilesystemStore(f"memory://{tmp_path.name}/run", Limits(deadline_s=0.2), {})


class Died(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_writer_that_dies_leaves_the_old_object_or_the_new_one(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    store.put("a/manifest", b"old")
    plain, made = store._fs.mv, []

    def dies(*paths: str) -> None:
        if len(made) == moves:
            raise Died
        plain(*paths)
        made.append(paths)

    def dies_before(path: str) -> None:
        if store._fs.exists(path):
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(store._fs, "mv", dies)
        patch.setattr(store, "_remove", dies_before)
        with pytest.raises(Died):
            store.put("a/manifest", b"newer")
    expected = b"newer" if moves == 2 else b"old"
    found = store.get("a/manifest")
    assert bytes(found.data) == expected
    assert bytes(store.get_ranges("a/manifest", [(1, 3)])[0]) == expected[1:3]
    there = store.head("a/manifest")
    assert there is not None
    assert there.version == found.version
    listed = [entry for entry in store.list("a/") if not entry.name.endswith(".new")]
    assert [(entry.name, entry.size) for entry in listed] == [("a/manifest", len(expected))]
    # the next writer replaces it, and nothing of it returns
    assert store.create("a/manifest", b"x") is None
    assert store.swap("a/manifest", b"newest", found.version)
    assert bytes(store.get("a/manifest").data) == b"newest"
    store.delete(["a/manifest"])
    with pytest.raises(MissingObjectError):
        store.get("a/manifest")


def test_half_of_a_file_is_not_taken_for_all(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"0123456789")
    whole = store._fs.cat_file

    def half(*args: Any) -> bytes:
        found: bytes = whole(*args)
        return found[: len(found) // 2]

    monkeypatch.setattr(store._fs, "cat_file", half)
    for read in (lambda: store.get("a"), lambda: store.get_ranges("a", [(2, 8)])):
        with pytest.raises(StoreError, match=r"could not read within .*got \d bytes, expected"):
            read()
