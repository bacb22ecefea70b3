# SPDX-License-Identifier: Apache-2.0
"""What a worker keeps on disk to replay its steps."""

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.journal.full_disk import FullDisk

from fleetlight.errors import ComebackError, ConfigError, JournalError
from fleetlight.ps import messages as m
from fleetlight.ps.resume import (
    LEFT,
    NOTHING,
    POSITIONS,
    STARTED,
    STEPPED,
    UNABLE,
    VALUES,
    Decision,
)
from fleetlight.ps.transport.protocol import HEADER_LIMIT
from fleetlight.ps.worker.replay import worker_journal
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.replay_log import LoggedReply, ReplayLog, may_be_made_again
from fleetlight.ps.worker.replay.step_journal import StepOrigin, start_stamp
from fleetlight.ps.worker.replay.worker_journal import (
    BlobStore,
    WorkerIdentity,
    WorkerJournal,
    clear_blobs,
)

# WorkerJournal: a restarted worker finds its last commit complete, or the one before it.


def identity(**facts: Any) -> WorkerIdentity:
    usual = {"worker": 1, "worker_num": 2, "server_num": 2, "job": "j", "start": 0}
    return WorkerIdentity(**{**usual, "started_at": 5, **facts})


def opened(path: Path, **facts: Any) -> WorkerJournal:
    return WorkerJournal(path, identity(**facts))


def push(sequence: int, value: float) -> tuple[m.Push, list[Any]]:
    message = m.Push(sequence, 0, 0, sequence, 0, [{"lr": 0.1}], [m.TablePush(0)], False)
    return message, [np.array([7], np.int64), np.full((1, 2), value, np.float32)]


def commit(journal: WorkerJournal, number: int, **facts: Any) -> None:
    point = ResumePoint(
        **{"replies": 0, "meetings": 0, "prelude": 0, "script": b"s%d" % number, **facts}
    )
    requests = {server: [push(number, float(server))] for server in range(2)}
    journal.commit(StepOrigin(0, 0, 0, point), 0, [number, number], requests)


def test_a_restart_finds_the_last_push(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert (first.identity.incarnation, first.last) == (1, None)
    for number in range(1, 4):
        commit(first, number)
    first.close(is_needed=True)
    second = opened(tmp_path, started_at=6)
    assert (second.identity.incarnation, second.identity.started_at) == (2, 5)
    last = second.last
    assert last is not None
    assert (last.commit.sequences, last.commit.resume_point.script) == ([3, 3], b"s3")
    for server, ((message, arrays),) in last.requests.items():
        assert message == push(3, 0.0)[0]
        assert arrays[1].tolist() == [[server, server]]
    second.close(is_needed=True)


def test_a_resume_point_may_exceed_the_message_limit(tmp_path: Path) -> None:
    """For example, of a model with many small buffers."""
    first, script = opened(tmp_path), bytes(HEADER_LIMIT + 1)
    commit(first, 1, script=script)
    first.close(is_needed=True)
    second = opened(tmp_path, started_at=6)
    assert second.last is not None
    assert second.last.commit.resume_point.script == script
    second.close(is_needed=True)


class Crash(Exception):
    """A crash of the process; the bytes written so far stay."""


@pytest.mark.parametrize("left", [0, 1, 10, 27, 28, 29, 100, 300, 400])
def test_a_torn_commit_is_ignored(
    tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def crashing(fd: int, buffers: Any, offset: int) -> int:
        nonlocal left
        data = b"".join(buffers)
        write(fd, [data[:left]], offset)
        left -= len(data)
        if left < 0:
            raise Crash
        return len(data)

    first = opened(tmp_path)
    for number in range(1, 4):
        commit(first, number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", crashing)
        with pytest.raises(Crash):
            commit(first, 4)
    first.close(is_needed=True)
    later = opened(tmp_path)
    assert later.last is not None
    assert later.last.commit.sequences == [3, 3]
    commit(later, 4)
    later.close(is_needed=True)
    last = opened(tmp_path)
    assert last.last is not None
    assert last.last.commit.sequences == [4, 4]
    last.close(is_needed=False)


@pytest.mark.parametrize("damage", [b"", b"x", b"\xf1REDO" + bytes(40)])
def test_an_unreadable_commit_is_ignored(tmp_path: Path, damage: bytes) -> None:
    first = opened(tmp_path)
    commit(first, 1)
    commit(first, 2)
    first.close(is_needed=True)
    (tmp_path / "push.0").write_bytes(damage)
    later = opened(tmp_path)
    assert later.last is not None
    assert later.last.commit.sequences == [1, 1]
    later.close(is_needed=False)


@pytest.mark.parametrize("facts", [{"job": "k"}, {"start": 1}, {"worker_num": 3}, {"job": ""}])
def test_state_of_another_job_is_not_resumed(tmp_path: Path, facts: dict[str, Any]) -> None:
    first = opened(tmp_path, **({"job": ""} if facts == {"job": ""} else {}))
    commit(first, 1)
    first.replies.once("a", lambda: [b"1"])
    first.close(is_needed=True)
    second = opened(tmp_path, started_at=6, **facts)
    assert (second.identity.incarnation, second.identity.started_at) == (1, 6)
    assert second.last is None
    assert not second.replies.is_known
    second.close(is_needed=True)


def test_another_format_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close(is_needed=True)
    path = tmp_path / "identity.json"
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), "format": 9}))
    for _ in range(2):
        with pytest.raises(JournalError, match="written in format 9, this version"):
            opened(tmp_path)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(JournalError, match="in use by another process"):
        opened(tmp_path)
    first.close(is_needed=False)
    assert os.listdir(tmp_path) == ["lock"]
    opened(tmp_path).close(is_needed=False)


def test_replies_survive_a_restart_except_a_torn_one(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.replies.once("a", lambda: [b"1", b""])
    first.replies.once("b", lambda: [b"2"])
    first.close(is_needed=True)
    path = tmp_path / "replies"
    os.truncate(path, path.stat().st_size - 1)
    second = opened(tmp_path)
    assert second.replies.once("a", lambda: pytest.fail("again")) == [b"1", b""]
    assert second.replies.once("b", lambda: [b"3"]) == [b"3"]
    second.close(is_needed=True)
    third = opened(tmp_path)
    assert third.replies.once("a", lambda: pytest.fail("again")) == [b"1", b""]
    assert third.replies.once("b", lambda: pytest.fail("again")) == [b"3"]
    third.close(is_needed=True)


def test_replies_before_the_last_commit_are_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_journal, "_COMPACT_BYTES", 1000)
    first = opened(tmp_path)
    for number in range(40):
        first.replies.once("a", lambda number=number: [b"%d" % number])  # type: ignore[misc]
    commit(first, 1, replies=38, prelude=2)
    assert (tmp_path / "replies").stat().st_size < 1000
    first.replies.once("a", lambda: [b"40"])
    first.close(is_needed=True)
    second = opened(tmp_path)
    assert [second.replies.once("a", lambda: [b"x"]) for _ in range(2)] == [[b"0"], [b"1"]]
    second.replies.go_on(38, 0)
    found = [second.replies.once("a", lambda: [b"x"]) for _ in range(4)]
    assert found == [[b"38"], [b"39"], [b"40"], [b"x"]]
    second.close(is_needed=False)


def test_compaction_waits_until_the_file_has_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replies of a script's prelude may alone exceed the limit for compaction."""
    monkeypatch.setattr(worker_journal, "_COMPACT_BYTES", 1000)
    first = opened(tmp_path)
    sizes, file = [], tmp_path / "replies"
    for _ in range(20):
        first.replies.once("a", lambda: [bytes(100)])
    for number in range(20, 120):
        first.replies.once("a", lambda: [bytes(100)])
        before = file.stat()
        commit(first, number, replies=number + 1, prelude=20)
        if file.stat().st_ino != before.st_ino:
            sizes.append((before.st_size, file.stat().st_size))
    kept = sizes[-1][1]
    assert [after for _, after in sizes] == [kept] * len(sizes)
    # first at the limit, then whenever the file has doubled
    assert len(sizes) == 5
    assert all(size > 2 * kept for size, _ in sizes[1:])
    first.close(is_needed=False)


def test_a_reply_written_during_compaction_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply is written before it is counted, and another thread may commit in between."""
    monkeypatch.setattr(worker_journal, "_COMPACT_BYTES", 1000)
    first = opened(tmp_path)
    for _ in range(20):
        first.replies.once("a", lambda: [bytes(100)])
    write = first.replies._write

    def write_and_push(*arguments: Any) -> None:
        write(*arguments)
        commit(first, 1, replies=20)

    monkeypatch.setattr(first.replies, "_write", write_and_push)
    first.replies.once("b", lambda: [b"1"])
    assert (tmp_path / "replies").stat().st_size < 1000
    first.close(is_needed=True)
    second = opened(tmp_path)
    second.replies.go_on(20, 0)
    assert second.replies.once("b", lambda: pytest.fail("again")) == [b"1"]
    second.close(is_needed=False)


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = WorkerJournal(tmp_path, identity(), patience_s=0.0)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(JournalError, match=r"cannot be written: No space .* could not resume"):
        commit(journal, 1)
    journal.close(is_needed=False)


FILES = ["lock", "identity.json.new", "push.0", "push.1", "replies"]


@pytest.mark.parametrize("name", FILES)
def test_opening_waits_for_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for incarnation in (1, 2):
        with monkeypatch.context() as patch:
            full = FullDisk(patch, name, 4)
            full.only_open = name != "identity.json.new"
            journal = opened(tmp_path)
            assert (full.left, journal.identity.incarnation) == (0, incarnation)
        commit(journal, incarnation)
        journal.close(is_needed=True)


@pytest.mark.parametrize("name", FILES)
def test_opening_on_a_full_disk_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    FullDisk(monkeypatch, name, 99)
    file = name.removesuffix(".new") if name != "lock" else ""
    text = rf"durability: \S*{file} cannot be .*: No space left on device; .*name another folder"
    with pytest.raises(JournalError, match=text):
        WorkerJournal(tmp_path, identity(), patience_s=0.0)


def test_a_blob_waits_for_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    full = FullDisk(monkeypatch, f"kept.{hashlib.sha256(bytes(range(9))).hexdigest()}.new", 4)
    full.only_open = True
    name = journal.blobs.put(np.arange(9, dtype=np.uint8))
    assert full.left == 0
    assert journal.blobs.get(name) == bytes(range(9))
    journal.close(is_needed=False)


def open_in_next_launch(path: Path, **facts: Any) -> WorkerJournal:
    wanted = identity(**{"job": "next", "started_at": 6, **facts})
    return WorkerJournal(path, wanted, resume=True)


@pytest.mark.parametrize("kind", [POSITIONS, VALUES])
def test_a_resumed_job_continues_after_the_decision(tmp_path: Path, kind: str) -> None:
    first = opened(tmp_path)
    commit(first, 1)
    first.close(is_needed=True)
    # a crash before the decision changes nothing
    open_in_next_launch(tmp_path).close(is_needed=True)
    resumed = open_in_next_launch(tmp_path)
    assert (resumed.remains.state, resumed.remains.job) == (STEPPED, "j")
    assert (resumed.identity.incarnation, resumed.identity.started_at) == (2, 5)
    assert resumed.is_undecided
    resumed.decide(Decision(kind, job="j"))
    assert (resumed.last is not None) == (kind == POSITIONS)
    resumed.begin()
    resumed.close(is_needed=True)
    # a restart in the same launch needs no decision, a new launch does
    for job, incarnation in (("next", 3), ("a third", 4)):
        later = open_in_next_launch(tmp_path, job=job)
        assert later.is_undecided == (job != "next")
        assert later.identity.incarnation == incarnation
        assert (later.last is not None) == (kind == POSITIONS)
        later.close(is_needed=True)


def test_state_of_another_job_is_kept_until_this_job_joins(tmp_path: Path) -> None:
    """If servers refuse this job, the other one can still be resumed."""
    first = opened(tmp_path)
    commit(first, 1)
    first.close(is_needed=True)
    for joined in (False, True):
        other = WorkerJournal(tmp_path, identity(job="other", started_at=9))
        assert (other.identity.started_at, other.last, other.has_committed) == (9, None, False)
        other.replies.once("before it joined", lambda: [b"x"])
        if joined:
            other.begin()
            other.replies.once("after it joined", lambda: [b"y"])
        other.close(is_needed=True)
        assert state_in_next_launch(tmp_path) == (STARTED if joined else STEPPED)
    later = WorkerJournal(tmp_path, identity(job="other", started_at=10))
    for name, reply in (("before it joined", b"x"), ("after it joined", b"y")):
        assert later.replies.once(name, list) == [reply]
    later.close(is_needed=True)


def state_in_next_launch(path: Path) -> str:
    journal = open_in_next_launch(path)
    journal.close(is_needed=True)
    return journal.remains.state


def test_the_state_tells_that_a_worker_left_or_cannot_resume(tmp_path: Path) -> None:
    assert state_in_next_launch(tmp_path) == NOTHING
    first = opened(tmp_path)
    first.give_up("its batches are its own")
    first.close(is_needed=True)
    assert state_in_next_launch(tmp_path) == UNABLE
    opened(tmp_path).close(is_needed=False, ended=True)
    assert sorted(os.listdir(tmp_path)) == ["identity.json", "lock"]
    assert state_in_next_launch(tmp_path) == LEFT
    # the state of a finished job does not stop another job
    other_job = opened(tmp_path, job="another")
    assert other_job.identity.incarnation == 1
    commit(other_job, 1)
    other_job.close(is_needed=True)
    assert state_in_next_launch(tmp_path) == STEPPED
    # with another number of workers the state does not apply
    journal = open_in_next_launch(tmp_path, worker_num=3)
    assert journal.remains.state == NOTHING
    journal.close(is_needed=True)


def test_a_commit_with_lost_pages_is_ignored(tmp_path: Path) -> None:
    """Pages reach a disk in any order, so the head may be there without the rest."""
    first = WorkerJournal(tmp_path, identity(), sync=True)
    for number in (1, 2):
        commit(first, number)
    first.close(is_needed=True)
    newest = tmp_path / "push.0"
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)
    second = opened(tmp_path)
    assert second.last is not None
    assert second.last.commit.sequences == [1, 1]
    second.close(is_needed=True)


def test_with_sync_each_write_is_synced_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for sync, times in ((False, 0), (True, 3)):
        journal = WorkerJournal(tmp_path / str(sync), identity(), sync=sync)
        commit(journal, 1)
        journal.replies.once("a call", list)
        journal.blobs.put(np.zeros(3, np.uint8))
        journal.close(is_needed=True)
        assert len(synced) == times


# ReplayLog: a restarted worker receives the replies that its predecessor received.


class RecordedCalls:
    """The records of logged calls, and replay logs of later incarnations that read them."""

    def __init__(self) -> None:
        self.written: list[tuple[LoggedReply, Sequence[bytes]]] = []

    def restart(self) -> ReplayLog:
        log = ReplayLog(lambda call, reply: self.written.append((call, reply)))
        for call, reply in list(self.written):
            log.remember(call, reply)
        return log


def call_once(log: ReplayLog, name: str, reply: bytes) -> Sequence[bytes]:
    def act() -> list[bytes]:
        log.meetings += 1
        return [reply]

    return log.once(name, act)


def test_logged_replies_are_replayed_before_new_calls() -> None:
    recorded = RecordedCalls()
    first = recorded.restart()
    assert [call_once(first, "a", b"1"), call_once(first, "b", b"2")] == [[b"1"], [b"2"]]
    second = recorded.restart()
    assert second.is_known
    assert [call_once(second, "a", b"x"), call_once(second, "b", b"x")] == [[b"1"], [b"2"]]
    assert second.meetings == 2
    assert not second.is_known
    assert call_once(second, "c", b"3") == [b"3"]
    third = recorded.restart()
    assert [call_once(third, name, b"x") for name in "abc"] == [[b"1"], [b"2"], [b"3"]]


def test_nested_calls_are_part_of_the_outer_call() -> None:
    recorded = RecordedCalls()
    first = recorded.restart()

    def load() -> list[bytes]:
        call_once(first, "look", b"1")
        call_once(first, "load", b"2")
        return [b"all"]

    first.once("load_persistables", load)
    call_once(first, "b", b"3")
    second = recorded.restart()
    assert second.once("load_persistables", lambda: pytest.fail("again")) == [b"all"]
    assert second.meetings == 2
    assert call_once(second, "b", b"x") == [b"3"]


def test_replay_starts_at_the_position_of_the_script() -> None:
    recorded = RecordedCalls()
    first = recorded.restart()
    for name in "abcde":
        call_once(first, name, name.encode())
    second = recorded.restart()
    call_once(second, "a", b"x")
    second.go_on(3, 3)
    assert [call_once(second, "d", b"x"), call_once(second, "e", b"x")] == [[b"d"], [b"e"]]
    assert [n for n in range(6) if may_be_made_again(n, prelude=1, since=3)] == [0, 3, 4, 5]


def test_a_different_script_is_refused() -> None:
    recorded = RecordedCalls()
    call_once(recorded.restart(), "barrier_worker", b"")
    with pytest.raises(ConfigError, match="called 'all_gather' where it called 'barrier_w"):
        call_once(recorded.restart(), "all_gather", b"")


# What tells processes apart that start at once.


def test_processes_that_start_in_the_same_microsecond_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert len({start_stamp() for _ in range(20)}) == 20


def test_a_later_start_has_a_greater_stamp_which_fits_into_int64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    year_2200 = 7_258_118_400 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: year_2200)
    first = max(start_stamp() for _ in range(20))
    monkeypatch.setattr(time, "time_ns", lambda: year_2200 + 10**6)
    assert first < start_stamp() < 2**63


# BlobStore: each blob is written once and kept while a commit may need it.


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


def test_a_full_disk_is_an_error_of_the_blob_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(JournalError, match=r"kept\.\w+\.new cannot be written: No space"):
        BlobStore(tmp_path, 0.0).put(data(1))
