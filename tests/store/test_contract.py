# SPDX-License-Identifier: Apache-2.0
"""What every store does, whatever is behind it."""

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.errors import refuses

from fleetlight.errors import MissingObjectError, StoreError
from fleetlight.store import ObjectStore, is_url, store_at
from fleetlight.store.buckets import CHUNK
from fleetlight.store.filesystems import FilesystemStore
from fleetlight.store.local import LocalStore
from fleetlight.store.retries import Limits


@pytest.fixture(params=["folder", "s3", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        return store_at(request.getfixturevalue("bucket"))
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return store_at(f"memory://{tmp_path.name}/run")
    return store_at(tmp_path / "run")


def test_an_object_is_read_as_it_was_written(store: ObjectStore) -> None:
    assert store.head("a/b") is None
    version = store.put("a/b", b"hello")
    found = store.get("a/b")
    assert bytes(found.data) == b"hello"
    assert (found.size, found.version) == (5, version)
    there = store.head("a/b")
    assert there is not None
    assert (there.name, there.size, there.version) == ("a/b", 5, version)
    assert [bytes(d) for d in store.get_ranges("a/b", [(1, 3), (4, 5), (2, 2)])] == [
        b"el",
        b"o",
        b"",
    ]


def test_an_empty_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert bytes(store.get("empty").data) == b""


def test_a_large_object_travels_in_parts(store: ObjectStore, tmp_path: Path) -> None:
    data = bytes(range(256)) * (2 * CHUNK // 256) + b"the end"
    file = tmp_path / "file"
    file.write_bytes(data)
    store.put("large", file)
    assert bytes(store.get("large").data) == data
    store.put("large", memoryview(data)[1:])
    assert bytes(store.get("large").data) == data[1:]
    [end] = store.get_ranges("large", [(len(data) - 4, len(data) - 1)])
    assert bytes(end) == b"end"


def test_a_name_without_an_object(store: ObjectStore) -> None:
    store.put("other", b"")
    for read in (lambda: store.get("none"), lambda: store.get_ranges("none", [(0, 1)])):
        with refuses(MissingObjectError, "/run/none: could not read: there is no such"):
            read()


def test_create_refuses_an_object_that_exists(store: ObjectStore) -> None:
    assert store.create("one", b"first")
    assert store.create("one", b"second") is None
    assert bytes(store.get("one").data) == b"first"


def test_swap_refuses_another_version(store: ObjectStore) -> None:
    first = store.put("one", b"1")
    second = store.swap("one", b"22", first)
    assert second
    assert second != first
    assert store.swap("one", b"333", first) is None
    assert store.swap("none", b"4", first) is None
    assert bytes(store.get("one").data) == b"22"


def test_list_and_delete(store: ObjectStore) -> None:
    assert store.list() == []
    for name in ("b", "a/2", "a/10", "ab/1"):
        store.put(name, name.encode())
    assert [entry.name for entry in store.list()] == ["a/10", "a/2", "ab/1", "b"]
    assert [entry.name for entry in store.list("a/")] == ["a/10", "a/2"]
    assert [entry.name for entry in store.list("a/1")] == ["a/10"]
    assert [entry.name for entry in store.list("a")] == ["a/10", "a/2", "ab/1"]
    assert [entry.size for entry in store.list("a/")] == [4, 3]
    store.delete(["a/2", "none", "b", "a/10"])
    assert [entry.name for entry in store.list()] == ["ab/1"]


def test_one_of_many_writers_creates(store: ObjectStore) -> None:
    if not store.is_exact:
        pytest.skip("said so: " + store.url)
    won: list[int] = []
    # the server of the tests looks and writes in two steps, so its writers take turns
    turn = threading.Lock() if store.url.startswith("s3") else threading.Semaphore(99)

    def write(number: int) -> None:
        with turn:
            if store.create("claim", f"writer {number}".encode()):
                won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert bytes(store.get("claim").data) == f"writer {won[0]}".encode()


def test_a_folder_refuses_names_outside_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for name in ("../x", "/etc/passwd", "a/../../x"):
        with pytest.raises(StoreError, match="expected one inside it"):
            store.put(name, b"")


def test_a_folder_has_no_remains(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a/b/c", b"")
    store.delete(["a/b/c"])
    assert [path.name for path in tmp_path.iterdir()] == [".store-lock"]


def test_urls_and_paths() -> None:
    assert [is_url(x) for x in ("s3://b/x", "file:///x", "/a/b", "a:b", Path("x"))] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert isinstance(store_at("file:///tmp/x"), LocalStore)
    with pytest.raises(ValueError, match="pass 's3://bucket/run' as a string"):
        is_url(Path("s3://bucket/run"))


# -- file systems of fsspec: what remains when a writer dies, and half-written files --------------

pytest.importorskip("fsspec")


@pytest.fixture
def in_memory(tmp_path: Path) -> FilesystemStore:
    return FilesystemStore(f"memory://{tmp_path.name}/run", Limits(deadline_s=0.2), {})


class Died(BaseException):
    """Stands for the death of the process."""


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_writer_that_dies_leaves_the_old_object_or_the_new_one(
    in_memory: FilesystemStore, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    in_memory.put("a/manifest", b"old")
    plain, made = in_memory._fs.mv, []

    def dies(*paths: str) -> None:
        if len(made) == moves:
            raise Died
        plain(*paths)
        made.append(paths)

    def dies_before(path: str) -> None:
        if in_memory._fs.exists(path):
            raise Died

    with monkeypatch.context() as patch:
        patch.setattr(in_memory._fs, "mv", dies)
        patch.setattr(in_memory, "_remove", dies_before)
        with pytest.raises(Died):
            in_memory.put("a/manifest", b"newer")
    expected = b"newer" if moves == 2 else b"old"
    found = in_memory.get("a/manifest")
    assert bytes(found.data) == expected
    assert bytes(in_memory.get_ranges("a/manifest", [(1, 3)])[0]) == expected[1:3]
    there = in_memory.head("a/manifest")
    assert there is not None
    assert there.version == found.version
    listed = [entry for entry in in_memory.list("a/") if not entry.name.endswith(".new")]
    assert [(entry.name, entry.size) for entry in listed] == [("a/manifest", len(expected))]
    # the next writer replaces it, and nothing of it returns
    assert in_memory.create("a/manifest", b"x") is None
    assert in_memory.swap("a/manifest", b"newest", found.version)
    assert bytes(in_memory.get("a/manifest").data) == b"newest"
    in_memory.delete(["a/manifest"])
    with pytest.raises(MissingObjectError):
        in_memory.get("a/manifest")


def test_half_of_a_file_is_not_taken_for_all(
    in_memory: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory.put("a", b"0123456789")
    whole = in_memory._fs.cat_file

    def half(*args: Any) -> bytes:
        found: bytes = whole(*args)
        return found[: len(found) // 2]

    monkeypatch.setattr(in_memory._fs, "cat_file", half)
    for read in (lambda: in_memory.get("a"), lambda: in_memory.get_ranges("a", [(2, 8)])):
        with pytest.raises(StoreError, match=r"could not read within .*got \d bytes, expected"):
            read()
