# SPDX-License-Identifier: Apache-2.0
"""What a bucket does wrong, what the user is told, and what every store does."""

import builtins
import logging
import os
import re
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
from tests.errors import refuses
from tests.store.s3 import (
    VARIABLES,
    CutReply,
    CutRequest,
    Fault,
    FaultProxy,
    HalfObject,
    LostReply,
    Stalled,
    Status,
)

from fleetlight.errors import (
    ConfigError,
    MissingObjectError,
    StoreError,
    StoreRefusedError,
    is_lasting,
)
from fleetlight.store import ObjectStore, is_url, retries, store_at
from fleetlight.store.buckets import CHUNK
from fleetlight.store.failures import Explanation
from fleetlight.store.filesystems import FilesystemStore
from fleetlight.store.local import LocalStore
from fleetlight.store.retries import Limits, Passing, retried

SLOW_DOWN = Status(503, "SlowDown")
PASSING = [LostReply(), Status(500), SLOW_DOWN, Status(429, ""), CutRequest()]


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    return store_at(bucket, deadline_s=20, request_s=5)


@pytest.mark.slow
@pytest.mark.parametrize("fault", PASSING, ids=repr)
def test_a_fault_that_passes_changes_nothing(
    store: ObjectStore, s3: FaultProxy, fault: Fault
) -> None:
    store.put("a", b"first")
    s3.fail(fault, times=2)
    assert bytes(store.get("a").data) == b"first"
    s3.fail(fault, times=2)
    version = store.put("a", b"second")
    s3.fail(fault)
    assert [e.name for e in store.list()] == ["a"]
    s3.fail(fault)
    assert store.swap("a", b"third", version)
    s3.fail(fault)
    assert store.swap("a", b"fourth", version) is None
    s3.fail(fault)
    assert store.create("b", b"mine")
    s3.fail(fault)
    assert store.create("b", b"yours") is None
    s3.fail(fault)
    store.delete(["b"])
    assert [(e.name, e.size) for e in store.list()] == [("a", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [CutRequest(), Status(500), LostReply()], ids=repr)
def test_a_part_of_a_large_object_is_sent_again(
    store: ObjectStore, s3: FaultProxy, fault: Fault
) -> None:
    data = os.urandom(CHUNK) * 2 + b"end"
    s3.fail(fault, method="PUT", path="partNumber=2")
    store.put("large", data)
    s3.fail(CutReply(), method="GET")
    assert bytes(store.get("large").data) == data


@pytest.mark.slow
def test_a_reply_that_stops_is_asked_for_again(bucket: str, s3: FaultProxy) -> None:
    store = store_at(bucket, deadline_s=20, request_s=0.5)
    store.put("a", b"whole content")
    s3.fail(Stalled(), method="GET", path="/a$")
    assert bytes(store.get("a").data) == b"whole content"


def test_an_object_replaced_during_a_read_is_read_from_its_start(
    bucket: str, s3: FaultProxy
) -> None:
    store = store_at(bucket, deadline_s=20)
    old, new = b"o" * (CHUNK + 5), b"n" * (CHUNK + 9)
    store.put("a", old)
    replaced: list[str] = []

    def rule(method: str, path: str) -> Fault | None:
        # after the first range has left
        if method == "GET" and s3.seen and s3.seen[-1][0] == "GET":
            replaced.append("now")
            s3.rule = lambda method, path: None
            store_at(bucket).put("a", new)
        return None

    s3.seen.clear()
    s3.rule = rule
    assert bytes(store.get("a").data) == new
    assert replaced


@pytest.mark.slow
def test_a_write_that_keeps_failing_ends_at_the_deadline(bucket: str, s3: FaultProxy) -> None:
    store = store_at(bucket, deadline_s=0.5)
    s3.rule = lambda method, path: SLOW_DOWN
    told = (
        rf"{bucket}/a: could not write within 0\.5 s \(\d+ attempts\): the bucket asks for fewer "
        r"requests \(SlowDown\); check the endpoint"
    )
    with pytest.raises(StoreError, match=told) as caught:
        store.put("a", b"x")
    assert not is_lasting(caught.value)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Status(403, "RequestTimeTooSkewed"), "the clock of this machine is wrong; set it"),
        (Status(403, "AccessDenied"), "access is denied; the credentials need permission"),
        (Status(403, "SignatureDoesNotMatch"), "the credentials are not valid"),
        (Status(400, "ExpiredToken"), "the credentials have expired; renew them"),
        (Status(301, "PermanentRedirect"), "set AWS_REGION"),
    ],
)
def test_what_does_not_pass_is_said_at_once(
    bucket: str, s3: FaultProxy, fault: Status, told: str
) -> None:
    store = store_at(bucket)
    for method, call in (("PUT", lambda: store.put("a", b"")), ("GET", lambda: store.get("a"))):
        s3.fail(fault, method=method, times=99)
        with pytest.raises(StoreRefusedError, match=f"^{bucket}/a: could not .*{told}") as caught:
            call()
        assert is_lasting(caught.value)
        _assert_no_secret(caught.value)


def test_a_bucket_that_does_not_exist(s3: FaultProxy) -> None:
    store = store_at("s3://nowhere/run")
    for call in (lambda: store.put("a", b""), lambda: store.get("a"), store.list):
        with pytest.raises(StoreRefusedError, match=r"s3://nowhere/run.*the bucket does not exist"):
            call()  # type: ignore[no-untyped-call]


def test_no_credentials(s3: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # a machine of a cloud answers here
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", s3.endpoint)
    s3.rule = lambda method, path: Status(404, "") if "latest" in path else None
    with pytest.raises(StoreRefusedError, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        store_at(bucket, deadline_s=1).put("a", b"")


def test_nobody_listens_at_the_endpoint(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match=r"within 0\.3 s .*the endpoint cannot be reached"):
        store_at(bucket, deadline_s=0.3).list()


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with refuses(ConfigError, "s3://bucket/run: got a URL with credentials") as caught:
        store_at("s3://AKIAOFTESTS:a-secret-of-tests@bucket/run")
    assert "a-secret" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] in ("obstore", "fsspec"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [n for n in sys.modules if n.partition(".")[0] in ("obstore", "fsspec")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    for url in ("s3://bucket/run", "hdfs://host/run"):
        with pytest.raises(ConfigError, match=r"pip install 'fleetlight\[storage\]'"):
            store_at(url)


def test_half_an_object_is_seen_by_its_size(store: ObjectStore, s3: FaultProxy) -> None:
    s3.fail(HalfObject(), method="PUT")
    store.put("a", b"0123456789")
    assert [entry.size for entry in store.list()] == [5]


def _assert_no_secret(error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert not re.search(re.escape(VARIABLES[name]), text), text


def test_a_file_system_without_conditions_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetlight.store import filesystems

    monkeypatch.setattr(filesystems, "_warned", set())
    for number in range(2):
        store_at(f"memory://{tmp_path.name}/{number}")
    assert [r.getMessage() for r in caplog.records if "second writer" in r.getMessage()] == [
        f"memory://{tmp_path.name}/0: this file system cannot refuse a second writer; let only one "
        "job write there"
    ]


# -- `retried`: repeats what may pass, says once why it waits, and ends at a deadline -------------


def explained(error: BaseException) -> Explanation:
    raise AssertionError(error)


def test_an_operation_that_waits_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "_REPORT_AFTER_S", 0.0)

    def act(attempt: int) -> str:
        if attempt < 3:
            raise Passing("the endpoint refuses connections")
        return "done"

    with caplog.at_level(logging.WARNING):
        limits = Limits(first_pause_s=0.0)
        assert retried("s3://bucket", "list objects", limits, act, explained) == "done"
    [line] = caplog.messages
    assert line == (
        "s3://bucket: could not list objects yet, trying for up to 300 s: the endpoint refuses "
        "connections"
    )


def test_an_operation_that_soon_succeeds_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def act(attempt: int) -> int:
        if not attempt:
            raise Passing("the server is busy")
        return attempt

    assert retried("s3://bucket", "get a", Limits(first_pause_s=0.0), act, explained) == 1
    assert not caplog.messages


def test_a_failure_that_does_not_pass_ends_at_the_deadline() -> None:
    def act(attempt: int) -> None:
        raise Passing("the server is busy")

    limits = Limits(deadline_s=0.0)
    with pytest.raises(StoreError, match=r"could not get a within 0 s \(1 attempts\)"):
        retried("s3://bucket", "get a", limits, act, explained)


# -- what every store does, whatever is behind it -------------------------------------------------


@pytest.fixture(params=["folder", "s3", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        return store_at(request.getfixturevalue("bucket"))
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return store_at(f"memory://{tmp_path.name}/run")
    return store_at(tmp_path / "run")


def test_an_object_is_read_as_it_was_written(any_store: ObjectStore) -> None:
    assert any_store.head("a/b") is None
    version = any_store.put("a/b", b"hello")
    found = any_store.get("a/b")
    assert bytes(found.data) == b"hello"
    assert (found.size, found.version) == (5, version)
    there = any_store.head("a/b")
    assert there is not None
    assert (there.name, there.size, there.version) == ("a/b", 5, version)
    assert [bytes(d) for d in any_store.get_ranges("a/b", [(1, 3), (4, 5), (2, 2)])] == [
        b"el",
        b"o",
        b"",
    ]


def test_an_empty_object(any_store: ObjectStore) -> None:
    any_store.put("empty", b"")
    assert bytes(any_store.get("empty").data) == b""


def test_a_large_object_travels_in_parts(any_store: ObjectStore, tmp_path: Path) -> None:
    data = bytes(range(256)) * (2 * CHUNK // 256) + b"the end"
    file = tmp_path / "file"
    file.write_bytes(data)
    any_store.put("large", file)
    assert bytes(any_store.get("large").data) == data
    any_store.put("large", memoryview(data)[1:])
    assert bytes(any_store.get("large").data) == data[1:]
    [end] = any_store.get_ranges("large", [(len(data) - 4, len(data) - 1)])
    assert bytes(end) == b"end"


def test_a_name_without_an_object(any_store: ObjectStore) -> None:
    any_store.put("other", b"")
    for read in (lambda: any_store.get("none"), lambda: any_store.get_ranges("none", [(0, 1)])):
        with refuses(MissingObjectError, "/run/none: could not read: there is no such"):
            read()


def test_create_refuses_an_object_that_exists(any_store: ObjectStore) -> None:
    assert any_store.create("one", b"first")
    assert any_store.create("one", b"second") is None
    assert bytes(any_store.get("one").data) == b"first"


def test_swap_refuses_another_version(any_store: ObjectStore) -> None:
    first = any_store.put("one", b"1")
    second = any_store.swap("one", b"22", first)
    assert second
    assert second != first
    assert any_store.swap("one", b"333", first) is None
    assert any_store.swap("none", b"4", first) is None
    assert bytes(any_store.get("one").data) == b"22"


def test_list_and_delete(any_store: ObjectStore) -> None:
    assert any_store.list() == []
    for name in ("b", "a/2", "a/10", "ab/1"):
        any_store.put(name, name.encode())
    assert [entry.name for entry in any_store.list()] == ["a/10", "a/2", "ab/1", "b"]
    assert [entry.name for entry in any_store.list("a/")] == ["a/10", "a/2"]
    assert [entry.name for entry in any_store.list("a/1")] == ["a/10"]
    assert [entry.name for entry in any_store.list("a")] == ["a/10", "a/2", "ab/1"]
    assert [entry.size for entry in any_store.list("a/")] == [4, 3]
    any_store.delete(["a/2", "none", "b", "a/10"])
    assert [entry.name for entry in any_store.list()] == ["ab/1"]


def test_one_of_many_writers_creates(any_store: ObjectStore) -> None:
    if not any_store.is_exact:
        pytest.skip("said so: " + any_store.url)
    won: list[int] = []
    # the server of the tests looks and writes in two steps, so its writers take turns
    turn = threading.Lock() if any_store.url.startswith("s3") else threading.Semaphore(99)

    def write(number: int) -> None:
        with turn:
            if any_store.create("claim", f"writer {number}".encode()):
                won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert bytes(any_store.get("claim").data) == f"writer {won[0]}".encode()


def test_a_folder_refuses_names_outside_it(tmp_path: Path) -> None:
    any_store = LocalStore(tmp_path / "run")
    for name in ("../x", "/etc/passwd", "a/../../x"):
        with pytest.raises(StoreError, match="expected one inside it"):
            any_store.put(name, b"")


def test_a_folder_has_no_remains(tmp_path: Path) -> None:
    any_store = LocalStore(tmp_path)
    any_store.create("a/b/c", b"")
    any_store.delete(["a/b/c"])
    assert [path.name for path in tmp_path.iterdir()] == [".store-lock"]


def test_urls_and_paths() -> None:
    assert [is_url(x) for x in ("s3://b/x", "file:///x", "/a/b", "a:b", Path("x"))] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert isinstance(store_at("file:///tmp/x"), LocalStore)
    with pytest.raises(ValueError, match="pass 's3://bucket/run' as a string"):
        is_url(Path("s3://bucket/run"))


# -- file systems of fsspec: what remains when a writer dies, and half-written files --------------


@pytest.fixture
def in_memory(tmp_path: Path) -> FilesystemStore:
    pytest.importorskip("fsspec")
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
