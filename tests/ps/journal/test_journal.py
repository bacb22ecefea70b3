# SPDX-License-Identifier: Apache-2.0
"""The journal: what is committed is in the file, in order, whoever wrote it and however full."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.journal.full import NoRoom

from fleetlight.errors import DeadlineError, JournalError
from fleetlight.ps.journal import disk_full_retry as room
from fleetlight.ps.journal import journal as at
from fleetlight.ps.journal import segment as at_segment
from fleetlight.ps.journal.journal import COMMIT, NEVER, SECOND, Journal, Policy
from fleetlight.ps.journal.records import LogRecord, Reader
from fleetlight.ps.journal.segment import Segment, cut, segments
from fleetlight.ps.messages import EndPhase, Fill, Message
from fleetlight.ps.transport.protocol import MessageCodec

CODEC: MessageCodec[Message] = MessageCodec(Message)


def opened(
    folder: Path, first: int = 1, said: list[str] | None = None, **policy: Any
) -> Journal[Message]:
    heard = [] if said is None else said
    return Journal(folder, CODEC, first, Policy(**policy), heard.append)


def written_down(folder: Path) -> list[LogRecord[Message]]:
    """All records of all files; there is nothing else in them."""
    found: list[LogRecord[Message]] = []
    for first, path in segments(folder):
        reader = Reader(CODEC, np.fromfile(path, np.uint8), first)
        found += reader
        assert reader.gap is None
    return found


def change(journal: Journal[Message], phase: int = 0) -> int:
    number = journal.put(journal.framed(EndPhase(phase)))
    journal.commit(number)
    return number


@pytest.mark.parametrize("sync", [COMMIT, SECOND, NEVER])
def test_what_is_committed_is_in_the_file(tmp_path: Path, sync: str) -> None:
    journal = opened(tmp_path, first=5, sync=sync)
    assert [change(journal, phase) for phase in range(3)] == [5, 6, 7]
    # before it is closed: whoever dies now has lost nothing
    assert [record.message for record in written_down(tmp_path)] == [EndPhase(n) for n in range(3)]
    journal.close()
    assert [record.number for record in written_down(tmp_path)] == [5, 6, 7]


def test_arrays_are_those_at_the_commit(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    message = Fill([0], dense=False)
    journal.commit(journal.put(journal.framed(message, [np.arange(2), rows])))
    journal.close()
    (record,) = written_down(tmp_path)
    assert np.array_equal(record.arrays[1], rows)


def test_many_threads_leave_one_order(tmp_path: Path) -> None:
    journal = opened(tmp_path, sync=NEVER)
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda n: change(journal, n), range(400)))
    journal.close()
    assert sorted(numbers) == list(range(1, 401))
    phases = {number: phase for phase, number in enumerate(numbers)}
    for record in written_down(tmp_path):
        assert record.message == EndPhase(phases[record.number])


class Slow:
    """Writes that begin when they are let."""

    def __init__(self, write: Callable[..., int]) -> None:
        self._write = write
        self.begun, self.may = threading.Semaphore(0), threading.Semaphore(0)
        self.calls = 0

    def __call__(self, *arguments: Any) -> int:
        self.calls += 1
        self.begun.release()
        self.may.acquire()
        return self._write(*arguments)


def test_who_comes_during_a_write_is_written_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(os.pwritev)
    monkeypatch.setattr(os, "pwritev", slow)
    journal = opened(tmp_path, sync=NEVER)
    with ThreadPoolExecutor(6) as threads:
        first = threads.submit(change, journal)
        slow.begun.acquire()
        numbers = [journal.put(journal.framed(EndPhase(n))) for n in range(5)]
        others = [threads.submit(journal.commit, number) for number in numbers]
        slow.may.release()
        slow.begun.acquire()
        slow.may.release()
        for future in (first, *others):
            future.result()
    assert slow.calls == 2
    assert len(written_down(tmp_path)) == 6
    journal.close()


def test_only_a_commit_that_was_asked_to_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for sync, expected in ((COMMIT, 1), (NEVER, 0)):
        folder = tmp_path / sync
        folder.mkdir()
        journal = opened(folder, sync=sync)
        synced.clear()
        change(journal)
        assert len(synced) == expected
        journal.close()


def test_in_the_background_it_is_synced_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.set())
    monkeypatch.setattr(at, "SYNC_S", 0.001)
    journal = opened(tmp_path, sync=SECOND)
    change(journal)
    assert synced.wait(60)
    journal.close()


def test_much_is_synced_before_the_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.set())
    monkeypatch.setattr(at, "SYNC_S", 600.0)
    monkeypatch.setattr(at, "SYNC_BYTES", 1000)
    journal = opened(tmp_path, sync=SECOND)
    while not synced.is_set() and journal.size < 1 << 20:
        change(journal)
    assert journal.size >= 1000
    assert synced.wait(60)
    journal.close()


def test_a_disk_that_loses_what_it_has_taken_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal = opened(tmp_path, sync=COMMIT)
    change(journal)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(JournalError, match="could not be written: Input/output error; make room"):
        change(journal)
    # never again: nobody knows what is on the disk
    monkeypatch.undo()
    with pytest.raises(JournalError, match="Input/output error"):
        journal.put(journal.framed(EndPhase(1)))
    with pytest.raises(JournalError):
        journal.close()


class Full:
    """A disk with room for so many bytes."""

    def __init__(self, write: Callable[..., int], room: int) -> None:
        self._write, self.room = write, room
        self.refused = threading.Event()

    def __call__(self, fd: int, buffers: Any, offset: int) -> int:
        if self.room <= 0:
            self.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        data = b"".join(buffers)[: self.room]
        self.room -= len(data)
        return self._write(fd, [data], offset)


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    journal = opened(tmp_path, said=said, sync=NEVER)
    change(journal)
    before = journal.size
    full = Full(os.pwritev, room=10)
    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(room, "_TRY_EVERY_S", 0.001)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(change, journal)
        assert full.refused.wait(60)
        # nothing half-written stays behind
        assert [record.number for record in written_down_of(tmp_path, before)] == [1]
        full.room = 1 << 20
        waiting.result()
    assert len(written_down(tmp_path)) == 2
    assert "No space left on device; trying again for 60 s, training waits" in said[0]
    assert said[1].endswith("there is room again")
    journal.close()


def written_down_of(folder: Path, size: int) -> list[LogRecord[Message]]:
    """What a reader would keep, were the writer to die now."""
    ((first, path),) = segments(folder)
    data = np.fromfile(path, np.uint8)
    reader = Reader(CODEC, data, first)
    found = list(reader)
    assert found[-1].stop == size
    return found


def test_a_disk_that_stays_full_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path, sync=NEVER, patience_s=0.05)
    change(journal)
    monkeypatch.setattr(os, "pwritev", Full(os.pwritev, room=3))
    monkeypatch.setattr(room, "_TRY_EVERY_S", 0.001)
    with pytest.raises(JournalError, match="No space left on device; make room"):
        change(journal)
    monkeypatch.undo()
    assert [record.number for record in written_down(tmp_path)] == [1]
    with pytest.raises(JournalError):
        journal.close()


def test_a_write_that_does_not_come_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(os.pwritev)
    monkeypatch.setattr(os, "pwritev", slow)
    journal = opened(tmp_path, sync=NEVER, patience_s=0.02)
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(change, journal)
        slow.begun.acquire()
        with pytest.raises(DeadlineError, match=r"a write has taken more than 0\.04 s"):
            journal.commit(journal.put(journal.framed(EndPhase(2))))
        slow.may.release(5)
        hanging.result()
    journal.close()


def test_it_goes_on_in_a_new_file(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for phase in range(3):
        change(journal, phase)
    assert journal.rotate() == 4
    # nothing has come since
    assert journal.rotate() == 4
    change(journal, 3)
    journal.put(journal.framed(EndPhase(4)))
    assert journal.rotate() == 6
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [1, 4, 6]
    assert [record.message for record in written_down(tmp_path)] == [EndPhase(n) for n in range(5)]


def test_a_full_disk_is_waited_for_where_a_life_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    full = NoRoom(monkeypatch, f"{5:020d}.journal", 3)
    # it opens the file and no write comes: each second refusal is none
    full.only_open = True
    journal = opened(tmp_path, 5, said)
    assert full.left == 0
    assert "No space left on device; trying again for 60 s" in said[0]
    change(journal)
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [5]
    NoRoom(monkeypatch, f"{9:020d}.journal", 9).only_open = True
    with pytest.raises(JournalError, match=r"records from 9 on could not be begun: .*make room"):
        opened(tmp_path, 9, patience_s=0.0)


@pytest.mark.parametrize("what", ["open", "sync_folder"])
def test_where_there_is_no_room_for_a_new_file_it_goes_on_in_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = opened(tmp_path)
    change(journal)
    with monkeypatch.context() as patch:
        patch.setattr(os if what == "open" else at_segment, what, full)
        with pytest.raises(JournalError, match=r"records from 2 on could not be begun: No space"):
            journal.rotate()
    assert len(segments(tmp_path)) == 1
    change(journal)
    assert journal.rotate() == 3
    change(journal)
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [1, 3]
    assert [record.number for record in written_down(tmp_path)] == [1, 2, 3]


def test_a_disk_that_takes_no_new_file_at_all_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal = opened(tmp_path)
    change(journal)
    with monkeypatch.context() as patch:
        patch.setattr(at_segment, "sync_folder", fail)
        with pytest.raises(JournalError, match="could not be begun: Input/output error"):
            journal.rotate()
        with pytest.raises(JournalError, match="could not be begun: Input/output error"):
            opened(tmp_path, first=2)
    with pytest.raises(JournalError, match="could not be begun: Input/output error"):
        change(journal)
    journal.close()


def test_what_is_put_while_a_file_is_replaced_lies_in_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    change(journal)
    commit, late = journal.commit, [2, 3]

    def commit_and_put(number: int) -> None:
        commit(number)
        if late:
            journal.put(journal.framed(EndPhase(late.pop(0))))

    monkeypatch.setattr(journal, "commit", commit_and_put)
    assert journal.rotate() == 4
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [1, 4]
    assert [record.number for record in written_down(tmp_path)] == [1, 2, 3]


def test_a_file_is_not_closed_while_somebody_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path, sync=NEVER)
    change(journal)
    slow = Slow(os.pwritev)
    monkeypatch.setattr(os, "pwritev", slow)
    commit, writing = journal.commit, list[Future[None]]()

    def commit_while_another_comes(number: int) -> None:
        if writing:
            # it was seen that somebody writes
            slow.may.release()
        commit(number)
        if not writing:
            late = journal.put(journal.framed(EndPhase(2)))
            writing.append(other.submit(commit, late))
            slow.begun.acquire()

    monkeypatch.setattr(journal, "commit", commit_while_another_comes)
    with ThreadPoolExecutor(1) as other:
        try:
            assert journal.rotate() == 3
        finally:
            slow.may.release(9)
        writing[0].result()
    journal.close()
    assert [record.number for record in written_down(tmp_path)] == [1, 2]


def test_a_closed_one_takes_nothing(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.put(journal.framed(EndPhase(0)))


def test_a_file_of_another_is_not_written_over(tmp_path: Path) -> None:
    opened(tmp_path, first=3).close()
    # its writer died before it wrote anything
    Segment(tmp_path, 3).write([b"a record"])
    with pytest.raises(FileExistsError):
        Segment(tmp_path, 3)


def test_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    change(journal)
    size = journal.size
    journal.close()
    ((_, path),) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(b"\0" * 100)
    cut(path, size)
    assert len(written_down(tmp_path)) == 1


def test_more_buffers_than_the_system_takes_at_once(tmp_path: Path) -> None:
    segment = Segment(tmp_path, 1)
    parts = [bytes([n % 256]) * (n % 5) for n in range(5000)]
    segment.write(parts)
    segment.write([b"end"])
    segment.close()
    assert segment.path.read_bytes() == b"".join(parts) + b"end"
