# SPDX-License-Identifier: Apache-2.0
"""The journal, its records, and what it does with a full disk or a folder in use."""

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ps.journal.full_disk import FullDisk

from fleetlight.errors import CheckpointError, DeadlineError, JournalError
from fleetlight.ps.changes import BarrierPassed
from fleetlight.ps.journal import disk_full_retry
from fleetlight.ps.journal import journal as journal_module
from fleetlight.ps.journal import segment as segment_module
from fleetlight.ps.journal.disk_full_retry import once_there_is_room, written
from fleetlight.ps.journal.journal import COMMIT, NEVER, SECOND, Journal, Policy
from fleetlight.ps.journal.locked_dir import lock_folder, refuse_if_in_use
from fleetlight.ps.journal.records import MAGIC, Gap, LogRecord, RecordReader, framed
from fleetlight.ps.journal.segment import Segment, cut, segments
from fleetlight.ps.messages import EndPhase, Fill, Message, MetricsRequest
from fleetlight.ps.server.durability import durability
from fleetlight.ps.transport.protocol import HEADER_LIMIT, Array, MessageCodec

# Journal: committed records are in the file and in order, with many threads or a full disk.


CODEC: MessageCodec[Message] = MessageCodec(Message)


def opened(
    folder: Path, first: int = 1, messages: list[str] | None = None, **policy: Any
) -> Journal[Message]:
    collected = [] if messages is None else messages
    return Journal(folder, CODEC, first, Policy(**policy), collected.append)


def records_in(folder: Path) -> list[LogRecord[Message]]:
    """All records of all files, which contain nothing else."""
    records: list[LogRecord[Message]] = []
    for first, path in segments(folder):
        reader = RecordReader(CODEC, np.fromfile(path, np.uint8), first)
        records += reader
        assert reader.gap is None
    return records


def write_change(journal: Journal[Message], phase: int = 0) -> int:
    number = journal.put(journal.framed(EndPhase(phase)))
    journal.commit(number)
    return number


@pytest.mark.parametrize("sync", [COMMIT, SECOND, NEVER])
def test_a_committed_record_is_in_the_file(tmp_path: Path, sync: str) -> None:
    journal = opened(tmp_path, first=5, sync=sync)
    assert [write_change(journal, phase) for phase in range(3)] == [5, 6, 7]
    # before the close: a crash now would lose nothing
    assert [record.message for record in records_in(tmp_path)] == [EndPhase(n) for n in range(3)]
    journal.close()
    assert [record.number for record in records_in(tmp_path)] == [5, 6, 7]


def test_a_record_contains_its_arrays(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    message = Fill([0], dense=False)
    journal.commit(journal.put(journal.framed(message, [np.arange(2), rows])))
    journal.close()
    (record,) = records_in(tmp_path)
    assert np.array_equal(record.arrays[1], rows)


def test_records_of_concurrent_threads_are_in_order(tmp_path: Path) -> None:
    journal = opened(tmp_path, sync=NEVER)
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda n: write_change(journal, n), range(400)))
    journal.close()
    assert sorted(numbers) == list(range(1, 401))
    phases = {number: phase for phase, number in enumerate(numbers)}
    for record in records_in(tmp_path):
        assert record.message == EndPhase(phases[record.number])


class SlowWrite:
    """Writes that finish when the test allows it."""

    def __init__(self, write: Callable[..., int]) -> None:
        self._write = write
        self.started, self.may_finish = threading.Semaphore(0), threading.Semaphore(0)
        self.calls = 0

    def __call__(self, *arguments: Any) -> int:
        self.calls += 1
        self.started.release()
        self.may_finish.acquire()
        return self._write(*arguments)


def test_records_during_a_write_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowWrite(os.pwritev)
    monkeypatch.setattr(os, "pwritev", slow)
    journal = opened(tmp_path, sync=NEVER)
    with ThreadPoolExecutor(6) as threads:
        first = threads.submit(write_change, journal)
        slow.started.acquire()
        numbers = [journal.put(journal.framed(EndPhase(n))) for n in range(5)]
        others = [threads.submit(journal.commit, number) for number in numbers]
        slow.may_finish.release()
        slow.started.acquire()
        slow.may_finish.release()
        for future in (first, *others):
            future.result()
    assert slow.calls == 2
    assert len(records_in(tmp_path)) == 6
    journal.close()


def test_only_sync_commit_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for sync, expected in ((COMMIT, 1), (NEVER, 0)):
        folder = tmp_path / sync
        folder.mkdir()
        journal = opened(folder, sync=sync)
        synced.clear()
        write_change(journal)
        assert len(synced) == expected
        journal.close()


def test_sync_second_syncs_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.set())
    monkeypatch.setattr(journal_module, "SYNC_S", 0.001)
    journal = opened(tmp_path, sync=SECOND)
    write_change(journal)
    assert synced.wait(60)
    journal.close()


def test_sync_second_syncs_early_after_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.set())
    monkeypatch.setattr(journal_module, "SYNC_S", 600.0)
    monkeypatch.setattr(journal_module, "SYNC_BYTES", 1000)
    journal = opened(tmp_path, sync=SECOND)
    while not synced.is_set() and journal.size < 1 << 20:
        write_change(journal)
    assert journal.size >= 1000
    assert synced.wait(60)
    journal.close()


@pytest.mark.durable
def test_a_failed_fsync_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal = opened(tmp_path, sync=COMMIT)
    write_change(journal)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(JournalError, match="could not be written: Input/output error; make room"):
        write_change(journal)
    # it stays broken, because the state of the disk is unknown
    monkeypatch.undo()
    with pytest.raises(JournalError, match="Input/output error"):
        journal.put(journal.framed(EndPhase(1)))
    with pytest.raises(JournalError):
        journal.close()


class LimitedDisk:
    """A disk with space for a number of bytes."""

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


def test_a_commit_waits_for_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    journal = opened(tmp_path, messages=messages, sync=NEVER)
    write_change(journal)
    before = journal.size
    full = LimitedDisk(os.pwritev, room=10)
    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(disk_full_retry, "_TRY_EVERY_S", 0.001)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(write_change, journal)
        assert full.refused.wait(60)
        # no partial record remains
        assert [record.number for record in whole_records(tmp_path, before)] == [1]
        full.room = 1 << 20
        waiting.result()
    assert len(records_in(tmp_path)) == 2
    assert "No space left on device; trying again for 60 s, training waits" in messages[0]
    assert messages[1].endswith("there is room again")
    journal.close()


def whole_records(folder: Path, size: int) -> list[LogRecord[Message]]:
    """The records that recovery would read after a crash now."""
    ((first, path),) = segments(folder)
    records = list(RecordReader(CODEC, np.fromfile(path, np.uint8), first))
    assert records[-1].stop == size
    return records


def test_a_disk_that_stays_full_ends_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path, sync=NEVER, patience_s=0.05)
    write_change(journal)
    monkeypatch.setattr(os, "pwritev", LimitedDisk(os.pwritev, room=3))
    monkeypatch.setattr(disk_full_retry, "_TRY_EVERY_S", 0.001)
    with pytest.raises(JournalError, match="No space left on device; make room"):
        write_change(journal)
    monkeypatch.undo()
    assert [record.number for record in records_in(tmp_path)] == [1]
    with pytest.raises(JournalError):
        journal.close()


def test_a_hung_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowWrite(os.pwritev)
    monkeypatch.setattr(os, "pwritev", slow)
    journal = opened(tmp_path, sync=NEVER, patience_s=0.02)
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(write_change, journal)
        slow.started.acquire()
        with pytest.raises(DeadlineError, match=r"a write has taken more than 0\.04 s"):
            journal.commit(journal.put(journal.framed(EndPhase(2))))
        slow.may_finish.release(5)
        hanging.result()
    journal.close()


def test_rotate_continues_in_a_new_file(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for phase in range(3):
        write_change(journal, phase)
    assert journal.rotate() == 4
    # no record since then
    assert journal.rotate() == 4
    write_change(journal, 3)
    journal.put(journal.framed(EndPhase(4)))
    assert journal.rotate() == 6
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [1, 4, 6]
    assert [record.message for record in records_in(tmp_path)] == [EndPhase(n) for n in range(5)]


def test_opening_waits_for_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    full = FullDisk(monkeypatch, f"{5:020d}.journal", 3)
    # opening writes nothing, so only the open may refuse
    full.only_open = True
    journal = opened(tmp_path, 5, messages)
    assert full.left == 0
    assert "No space left on device; trying again for 60 s" in messages[0]
    write_change(journal)
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [5]
    FullDisk(monkeypatch, f"{9:020d}.journal", 9).only_open = True
    with pytest.raises(JournalError, match=r"records from 9 on could not be begun: .*make room"):
        opened(tmp_path, 9, patience_s=0.0)


@pytest.mark.parametrize("call", ["open", "sync_folder"])
def test_a_failed_rotate_continues_in_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = opened(tmp_path)
    write_change(journal)
    with monkeypatch.context() as patch:
        patch.setattr(os if call == "open" else segment_module, call, full)
        with pytest.raises(JournalError, match=r"records from 2 on could not be begun: No space"):
            journal.rotate()
    assert len(segments(tmp_path)) == 1
    write_change(journal)
    assert journal.rotate() == 3
    write_change(journal)
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [1, 3]
    assert [record.number for record in records_in(tmp_path)] == [1, 2, 3]


def test_a_failed_folder_sync_ends_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal = opened(tmp_path)
    write_change(journal)
    with monkeypatch.context() as patch:
        patch.setattr(segment_module, "sync_folder", fail)
        with pytest.raises(JournalError, match="could not be begun: Input/output error"):
            journal.rotate()
        with pytest.raises(JournalError, match="could not be begun: Input/output error"):
            opened(tmp_path, first=2)
    with pytest.raises(JournalError, match="could not be begun: Input/output error"):
        write_change(journal)
    journal.close()


def test_records_during_a_rotate_are_in_one_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    write_change(journal)
    commit, late = journal.commit, [2, 3]

    def commit_and_put(number: int) -> None:
        commit(number)
        if late:
            journal.put(journal.framed(EndPhase(late.pop(0))))

    monkeypatch.setattr(journal, "commit", commit_and_put)
    assert journal.rotate() == 4
    journal.close()
    assert [first for first, _ in segments(tmp_path)] == [1, 4]
    assert [record.number for record in records_in(tmp_path)] == [1, 2, 3]


def test_rotate_waits_for_a_write_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path, sync=NEVER)
    write_change(journal)
    slow = SlowWrite(os.pwritev)
    monkeypatch.setattr(os, "pwritev", slow)
    commit, writing = journal.commit, list[Future[None]]()

    def commit_during_write(number: int) -> None:
        if writing:
            # the rotation has seen the write in progress
            slow.may_finish.release()
        commit(number)
        if not writing:
            late = journal.put(journal.framed(EndPhase(2)))
            writing.append(other.submit(commit, late))
            slow.started.acquire()

    monkeypatch.setattr(journal, "commit", commit_during_write)
    with ThreadPoolExecutor(1) as other:
        try:
            assert journal.rotate() == 3
        finally:
            slow.may_finish.release(9)
        writing[0].result()
    journal.close()
    assert [record.number for record in records_in(tmp_path)] == [1, 2]


def test_a_closed_journal_refuses_records(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.put(journal.framed(EndPhase(0)))


def test_a_segment_with_records_is_not_overwritten(tmp_path: Path) -> None:
    opened(tmp_path, first=3).close()
    # the empty file of a writer that crashed is reused
    Segment(tmp_path, 3).write([b"a record"])
    with pytest.raises(FileExistsError):
        Segment(tmp_path, 3)


def test_cut_removes_a_torn_end(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    write_change(journal)
    size = journal.size
    journal.close()
    ((_, path),) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(b"\0" * 100)
    cut(path, size)
    assert len(records_in(tmp_path)) == 1


def test_one_write_may_have_more_buffers_than_iov_max(tmp_path: Path) -> None:
    segment = Segment(tmp_path, 1)
    parts = [bytes([n % 256]) * (n % 5) for n in range(5000)]
    segment.write(parts)
    segment.write([b"end"])
    segment.close()
    assert segment.path.read_bytes() == b"".join(parts) + b"end"


# Records: written ones are read, and a torn end is distinguished from damage.


FIRST = 7


def filled(count: int) -> tuple[Message, list[Array]]:
    ids = np.arange(count, dtype=np.int64)
    return Fill([0], dense=False), [ids, np.full((count, 3), 0.5, np.float32)]


def sample(count: int = 4, first: int = FIRST) -> tuple[bytes, list[int]]:
    """Records of several sizes, and the offsets where each begins and the last ends."""
    data, starts = b"", [0]
    for number in range(first, first + count):
        message, arrays = filled(number % 3)
        data += b"".join(framed(CODEC, message, arrays).sealed(number))
        starts.append(len(data))
    return data, starts


def read(data: bytes, first: int = FIRST) -> tuple[list[LogRecord[Message]], Gap | None]:
    reader = RecordReader(CODEC, np.frombuffer(data, np.uint8), first)
    return list(reader), reader.gap


def test_written_records_are_read() -> None:
    data, starts = sample()
    records, gap = read(data)
    assert gap is None
    assert [record.number for record in records] == [7, 8, 9, 10]
    assert [(record.start, record.stop) for record in records] == list(itertools.pairwise(starts))
    for record in records:
        message, arrays = filled(record.number % 3)
        assert record.message == message
        for got, expected in zip(record.arrays, arrays, strict=True):
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected)


def test_an_empty_file_has_no_record_and_no_gap() -> None:
    assert read(b"") == ([], None)


def test_a_truncated_file_is_torn_at_its_end() -> None:
    data, starts = sample()
    for end in range(len(data)):
        records, gap = read(data[:end])
        whole = sum(stop <= end for stop in starts[1:])
        assert len(records) == whole
        if end in starts:
            assert gap is None
        else:
            assert gap is not None
            assert (gap.at, gap.followed_by, gap.is_short) == (starts[whole], None, True)


@pytest.mark.parametrize("rest", [b"\0", bytes(4096), MAGIC, MAGIC * 9, b"junk" * 100])
def test_garbage_after_the_last_record_is_a_torn_end(rest: bytes) -> None:
    data, starts = sample()
    records, gap = read(data + rest)
    assert len(records) == 4
    assert gap is not None
    assert (gap.at, gap.followed_by) == (starts[-1], None)


@given(st.data())
def test_a_flipped_bit_is_detected_and_the_next_record_named(data: st.DataObject) -> None:
    whole, starts = sample()
    offset = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[offset] ^= 1 << data.draw(st.integers(0, 7))
    records, gap = read(bytes(changed))
    number = sum(stop <= offset for stop in starts[1:])
    assert len(records) == number
    assert gap is not None
    assert gap.at == starts[number]
    # a changed last record cannot be distinguished from a torn one
    assert gap.followed_by == (FIRST + number + 1 if number < 3 else None)


def test_a_missing_record_is_detected() -> None:
    data, starts = sample()
    records, gap = read(data[: starts[1]] + data[starts[2] :])
    assert [record.number for record in records] == [7]
    assert gap == Gap(starts[1], "record 9 lies where 8 should", 10)


def test_a_file_with_other_record_numbers_is_a_gap() -> None:
    data, _ = sample(first=3)
    records, gap = read(data)
    assert records == []
    assert gap is not None
    assert gap.why == "record 3 lies where 7 should"


def test_records_far_after_a_hole_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.journal.records._SEARCH_BYTES", 8)
    data, starts = sample()
    for hole in range(1, 40):
        records, gap = read(data[: starts[2]] + bytes(hole) + data[starts[3] :])
        assert len(records) == 2
        assert gap is not None
        assert (gap.at, gap.followed_by) == (starts[2], 10)


def test_a_record_is_a_copy_of_its_arrays() -> None:
    """Applying gradients may overwrite their memory."""
    rows = np.ones(1000, np.float32)
    record = framed(CODEC, Fill([], dense=True), [rows])
    before = b"".join(record.sealed(FIRST))
    rows[:] = 5
    assert b"".join(record.sealed(FIRST)) == before
    assert record.nbytes == len(before)
    assert read(before)[1] is None


def test_small_records_have_little_overhead() -> None:
    assert framed(CODEC, EndPhase(3)).nbytes < 80
    assert framed(CODEC, MetricsRequest()).nbytes < 70


def test_a_logged_change_may_exceed_the_message_limit() -> None:
    """For example, of an epoch with many ranges."""
    change = BarrierPassed(1, "x" * (HEADER_LIMIT + 1), [])
    data = b"".join(framed(durability.CODEC, change).sealed(FIRST))
    [record] = RecordReader(durability.CODEC, np.frombuffer(data, np.uint8), FIRST)
    assert record.message == change


# disk_full_retry: a write waits for space on a full disk, and for no other error.


PATH = Path("/kept/file")


class FailingWrite:
    """An operation that fails a number of times."""

    def __init__(self, times: int, *, code: int = errno.ENOSPC, wrapped: bool = False) -> None:
        self.left, self.code, self.wrapped = times, code, wrapped

    def __call__(self) -> str:
        self.left -= 1
        if self.left < 0:
            return "done"
        error = OSError(self.code, "No room")
        if self.wrapped:
            raise CheckpointError("rows cannot be written") from error
        raise error


def never(_: float) -> bool:
    raise AssertionError("waited")


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_waits_for_disk_space(code: int, wrapped: bool) -> None:
    messages: list[str] = []
    waited: list[float] = []
    failing = FailingWrite(3, code=code, wrapped=wrapped)
    assert once_there_is_room(PATH, failing, 60.0, messages.append, waited.append) == "done"  # type: ignore[arg-type]
    assert len(waited) == 3
    assert messages == [
        "cannot write to /kept/file: No room; trying again for 60 s, training waits",
        "/kept/file: there is room again",
    ]


def test_other_errors_are_not_retried() -> None:
    with pytest.raises(OSError, match="No room"):
        once_there_is_room(PATH, FailingWrite(1, code=errno.EIO), 60.0, wait=never)
    assert once_there_is_room(PATH, FailingWrite(0), 60.0, wait=never) == "done"


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_disk_that_stays_full_is_an_error(patience_s: float) -> None:
    failing = FailingWrite(99)
    with pytest.raises(OSError, match="No room"):
        # the first wait exhausts the patience
        once_there_is_room(PATH, failing, patience_s, wait=lambda _: True)
    assert failing.left == (98 if not patience_s else 97)


def test_the_error_of_a_failed_write_says_what_to_do() -> None:
    text = r"durability: /kept/file cannot be written: No room; make room or .* name another folder"
    with pytest.raises(JournalError, match=text):
        written(PATH, FailingWrite(99), 0.0)


# One process locks a folder; the errors of the others name it.


def test_one_process_at_a_time_locks_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    lock = lock_folder(folder)
    expected = rf"in use by another process \(process {os.getpid()} on .+\); give"
    with pytest.raises(JournalError, match=expected):
        lock_folder(folder)
    with pytest.raises(JournalError, match=expected):
        refuse_if_in_use(folder)
    lock.release()
    refuse_if_in_use(folder)
    lock_folder(folder).release()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"cannot be used: .*; name another folder"):
        lock_folder(tmp_path / "file")


def test_a_file_system_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(JournalError, match=r"cannot be used: No locks available; name another"):
        lock_folder(tmp_path)
