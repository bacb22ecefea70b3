# SPDX-License-Identifier: Apache-2.0
"""Redo: what a worker was about to bring is there after its end, whole or as before."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.journal.full import NoRoom

from fleetlight.errors import JournalError
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
from fleetlight.ps.worker.replay import worker_journal as journal_module
from fleetlight.ps.worker.replay.commit_log import ResumePoint
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal


def identity(**facts: Any) -> WorkerIdentity:
    usual = {"worker": 1, "worker_num": 2, "server_num": 2, "job": "j", "start": 0}
    return WorkerIdentity(**{**usual, "started_at": 5, **facts})


def opened(path: Path, **facts: Any) -> WorkerJournal:
    return WorkerJournal(path, identity(**facts))


def push(sequence: int, value: float) -> tuple[m.Push, list[Any]]:
    message = m.Push(sequence, 0, 0, sequence, 0, [{"lr": 0.1}], [m.TablePush(0)], False)
    return message, [np.array([7], np.int64), np.full((1, 2), value, np.float32)]


def commit(journal: WorkerJournal, number: int, **facts: Any) -> None:
    moment = ResumePoint(
        **{"replies": 0, "meetings": 0, "prelude": 0, "script": b"s%d" % number, **facts}
    )
    requests = {server: [push(number, float(server))] for server in range(2)}
    journal.commit(StepOrigin(0, 0, 0, moment), 0, [number, number], requests)


def test_the_last_push_is_found_by_a_later_life(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert (first.identity.incarnation, first.last) == (1, None)
    for number in range(1, 4):
        commit(first, number)
    first.close(is_needed=True)
    second = opened(tmp_path, started_at=6)
    assert (second.identity.incarnation, second.identity.started_at) == (2, 5)
    last = second.last
    assert last is not None
    assert (last.commit.sequences, last.commit.moment.script) == ([3, 3], b"s3")
    for server, ((message, arrays),) in last.requests.items():
        assert message == push(3, 0.0)[0]
        assert arrays[1].tolist() == [[server, server]]
    second.close(is_needed=True)


def test_a_moment_may_be_longer_than_what_travels(tmp_path: Path) -> None:
    """A model has many small buffers, say."""
    first, script = opened(tmp_path), bytes(HEADER_LIMIT + 1)
    commit(first, 1, script=script)
    first.close(is_needed=True)
    second = opened(tmp_path, started_at=6)
    assert second.last is not None
    assert second.last.commit.moment.script == script
    second.close(is_needed=True)


class Death(Exception):
    """Of the process; what it has written so far stays."""


@pytest.mark.parametrize("left", [0, 1, 10, 27, 28, 29, 100, 300, 400])
def test_one_that_its_writer_died_over_is_none(
    tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def dying(fd: int, buffers: Any, offset: int) -> int:
        nonlocal left
        data = b"".join(buffers)
        write(fd, [data[:left]], offset)
        left -= len(data)
        if left < 0:
            raise Death
        return len(data)

    first = opened(tmp_path)
    for number in range(1, 4):
        commit(first, number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", dying)
        with pytest.raises(Death):
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
def test_nonsense_is_no_commit(tmp_path: Path, damage: bytes) -> None:
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
def test_what_others_have_left_is_not_taken_up(tmp_path: Path, facts: dict[str, Any]) -> None:
    first = opened(tmp_path, **({"job": ""} if facts == {"job": ""} else {}))
    commit(first, 1)
    first.replies.once("a", lambda: [b"1"])
    first.close(is_needed=True)
    second = opened(tmp_path, started_at=6, **facts)
    assert (second.identity.incarnation, second.identity.started_at) == (1, 6)
    assert second.last is None
    assert not second.replies.is_known
    second.close(is_needed=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(JournalError, match="in use by another process"):
        opened(tmp_path)
    first.close(is_needed=False)
    assert os.listdir(tmp_path) == ["lock"]
    opened(tmp_path).close(is_needed=False)


def test_answers_outlive_the_worker_and_a_torn_one_is_asked_for_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.replies.once("a", lambda: [b"1", b""])
    first.replies.once("b", lambda: [b"2"])
    first.close(is_needed=True)
    path = tmp_path / "answers"
    os.truncate(path, path.stat().st_size - 1)
    second = opened(tmp_path)
    assert second.replies.once("a", lambda: pytest.fail("again")) == [b"1", b""]
    assert second.replies.once("b", lambda: [b"3"]) == [b"3"]
    second.close(is_needed=True)
    third = opened(tmp_path)
    assert third.replies.once("a", lambda: pytest.fail("again")) == [b"1", b""]
    assert third.replies.once("b", lambda: pytest.fail("again")) == [b"3"]
    third.close(is_needed=True)


def test_answers_that_nobody_asks_for_again_are_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000)
    first = opened(tmp_path)
    for number in range(40):
        first.replies.once("a", lambda number=number: [b"%d" % number])  # type: ignore[misc]
    commit(first, 1, replies=38, prelude=2)
    assert (tmp_path / "answers").stat().st_size < 1000
    first.replies.once("a", lambda: [b"40"])
    first.close(is_needed=True)
    second = opened(tmp_path)
    assert [second.replies.once("a", lambda: [b"x"]) for _ in range(2)] == [[b"0"], [b"1"]]
    second.replies.go_on(38, 0)
    found = [second.replies.once("a", lambda: [b"x"]) for _ in range(4)]
    assert found == [[b"38"], [b"39"], [b"40"], [b"x"]]
    second.close(is_needed=False)


def test_what_is_kept_is_not_written_anew_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of a script may have more to keep than that."""
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000)
    first = opened(tmp_path)
    sizes, file = [], tmp_path / "answers"
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
    # the first time as soon as it is allowed, then each time there is twice as much
    assert len(sizes) == 5
    assert all(size > 2 * kept for size, _ in sizes[1:])
    first.close(is_needed=False)


def test_an_answer_that_comes_while_it_is_written_anew_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written before it is counted; another thread may push just then."""
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000)
    first = opened(tmp_path)
    for _ in range(20):
        first.replies.once("a", lambda: [bytes(100)])
    write = first.replies._write

    def write_and_push(*arguments: Any) -> None:
        write(*arguments)
        commit(first, 1, replies=20)

    monkeypatch.setattr(first.replies, "_write", write_and_push)
    first.replies.once("b", lambda: [b"1"])
    assert (tmp_path / "answers").stat().st_size < 1000
    first.close(is_needed=True)
    second = opened(tmp_path)
    second.replies.go_on(20, 0)
    assert second.replies.once("b", lambda: pytest.fail("again")) == [b"1"]
    second.close(is_needed=False)


def test_a_disk_that_stays_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = WorkerJournal(tmp_path, identity(), patience_s=0.0)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(JournalError, match=r"cannot be written: No space .* could not resume"):
        commit(journal, 1)
    journal.close(is_needed=False)


FILES = ["lock", "identity.json.new", "push.0", "push.1", "answers"]


@pytest.mark.parametrize("name", FILES)
def test_a_life_begins_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for incarnation in (1, 2):
        with monkeypatch.context() as patch:
            full = NoRoom(patch, name, 4)
            full.only_open = name != "identity.json.new"
            journal = opened(tmp_path)
            assert (full.left, journal.identity.incarnation) == (0, incarnation)
        commit(journal, incarnation)
        journal.close(is_needed=True)


@pytest.mark.parametrize("name", FILES)
def test_a_life_that_finds_no_room_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    NoRoom(monkeypatch, name, 99)
    file = name.removesuffix(".new") if name != "lock" else ""
    text = rf"durability: \S*{file} cannot be .*: No space left on device; .*name another folder"
    with pytest.raises(JournalError, match=text):
        WorkerJournal(tmp_path, identity(), patience_s=0.0)


def test_what_is_large_waits_for_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    full = NoRoom(monkeypatch, f"kept.{hashlib.sha256(bytes(range(9))).hexdigest()}.new", 4)
    full.only_open = True
    name = journal.shelf.put(np.arange(9, dtype=np.uint8))
    assert full.left == 0
    assert journal.shelf.get(name) == bytes(range(9))
    journal.close(is_needed=False)


def of_next_launch(path: Path, **facts: Any) -> WorkerJournal:
    wanted = identity(**{"job": "next", "started_at": 6, **facts})
    return WorkerJournal(path, wanted, resume=True)


@pytest.mark.parametrize("kind", [POSITIONS, VALUES])
def test_a_job_that_is_resumed_goes_on_in_the_folder_if_all_agree(
    tmp_path: Path, kind: str
) -> None:
    first = opened(tmp_path)
    commit(first, 1)
    first.close(is_needed=True)
    # who dies before all have decided leaves all as it was
    of_next_launch(tmp_path).close(is_needed=True)
    again = of_next_launch(tmp_path)
    assert (again.remains.state, again.remains.job) == (STEPPED, "j")
    assert (again.identity.incarnation, again.identity.started_at) == (2, 5)
    assert again.is_undecided
    again.decide(Decision(kind, job="j"))
    assert (again.last is not None) == (kind == POSITIONS)
    again.begin()
    again.close(is_needed=True)
    # a life in the same launch asks nobody, one in another asks again
    for job, incarnation in (("next", 3), ("a third", 4)):
        later = of_next_launch(tmp_path, job=job)
        assert later.is_undecided == (job != "next")
        assert later.identity.incarnation == incarnation
        assert (later.last is not None) == (kind == POSITIONS)
        later.close(is_needed=True)


def test_what_another_job_has_left_stays_until_this_one_has_joined(tmp_path: Path) -> None:
    """Servers may refuse it: then that job can still be resumed."""
    first = opened(tmp_path)
    commit(first, 1)
    first.close(is_needed=True)
    for joins in (False, True):
        other = WorkerJournal(tmp_path, identity(job="other", started_at=9))
        assert (other.identity.started_at, other.last, other.has_committed) == (9, None, False)
        other.replies.once("before it joined", lambda: [b"x"])
        if joins:
            other.begin()
            other.replies.once("behind that", lambda: [b"y"])
        other.close(is_needed=True)
        assert of_next_launch_state(tmp_path) == (STARTED if joins else STEPPED)
    later = WorkerJournal(tmp_path, identity(job="other", started_at=10))
    for name, answer in (("before it joined", b"x"), ("behind that", b"y")):
        assert later.replies.once(name, list) == [answer]
    later.close(is_needed=True)


def of_next_launch_state(path: Path) -> str:
    journal = of_next_launch(path)
    journal.close(is_needed=True)
    return journal.remains.state


def test_a_worker_says_that_it_has_left_or_cannot_resume(tmp_path: Path) -> None:
    assert of_next_launch_state(tmp_path) == NOTHING
    first = opened(tmp_path)
    first.give_up("its batches are its own")
    first.close(is_needed=True)
    assert of_next_launch_state(tmp_path) == UNABLE
    last = opened(tmp_path)
    last.close(is_needed=False, ended=True)
    assert sorted(os.listdir(tmp_path)) == ["identity.json", "lock"]
    assert of_next_launch_state(tmp_path) == LEFT
    # which is in nobody's way
    another = opened(tmp_path, job="another")
    assert another.identity.incarnation == 1
    commit(another, 1)
    another.close(is_needed=True)
    assert of_next_launch_state(tmp_path) == STEPPED
    # and with another number of workers it is not theirs
    journal = of_next_launch(tmp_path, worker_num=3)
    assert journal.remains.state == NOTHING
    journal.close(is_needed=True)


def test_what_a_disk_has_lost_of_a_commit_makes_it_none(tmp_path: Path) -> None:
    """Pages come to a disk in any order: the head may be there before the rest."""
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


def test_what_is_to_outlive_the_machine_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for sync, times in ((False, 0), (True, 3)):
        journal = WorkerJournal(tmp_path / str(sync), identity(), sync=sync)
        commit(journal, 1)
        journal.replies.once("a call", list)
        journal.shelf.put(np.zeros(3, np.uint8))
        journal.close(is_needed=True)
        assert len(synced) == times
