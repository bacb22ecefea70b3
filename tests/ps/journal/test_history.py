# SPDX-License-Identifier: Apache-2.0
"""A history of records on disk, and its segments."""

import errno
import itertools
import mmap
import os
import threading
from pathlib import Path

import pytest

from fleetlight.errors import JournalError
from fleetlight.ps.journal import fsync_marker
from fleetlight.ps.journal import history as history_module
from fleetlight.ps.journal.fsync_marker import SyncedBytes
from fleetlight.ps.journal.history import history
from fleetlight.ps.journal.records import framed
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.messages import EndPhase, Message
from fleetlight.ps.transport.protocol import MessageCodec

# history: recovery reads every record or raises an error; only the end may be torn.


pytestmark = pytest.mark.durable

CODEC: MessageCodec[Message] = MessageCodec(Message)


def write(folder: Path, *files: range, synced: int = 0) -> list[Path]:
    """Write a file for each range of numbers, and sync all records up to `synced`."""
    for numbers in files:
        segment = Segment(folder, numbers.start)
        for number in numbers:
            segment.write(framed(CODEC, EndPhase(number)).sealed(number))
            if number == synced:
                segment.sync()
        segment.close()
    return [path for _, path in segments(folder)]


def read(folder: Path, first: int = 1) -> tuple[list[int], list[str]]:
    warnings: list[str] = []
    return [record.number for record in history(folder, CODEC, first, warnings.append)], warnings


def test_files_are_read_one_after_another(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), range(4, 5), range(5, 9))
    assert read(tmp_path) == (list(range(1, 9)), [])
    assert read(tmp_path, first=5) == (list(range(5, 9)), [])


def test_an_empty_folder_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], [])


def test_an_empty_last_file_has_no_records(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), range(4, 4))
    assert read(tmp_path) == ([1, 2, 3], [])


def test_a_torn_end_is_cut_off_with_a_warning(tmp_path: Path) -> None:
    *_, last = write(tmp_path, range(1, 4), range(4, 6))
    last.write_bytes(last.read_bytes()[:-1])
    numbers, (warnings,) = read(tmp_path)
    assert numbers == [1, 2, 3, 4]
    assert "are no whole record" in warnings
    assert "so they are cut off" in warnings
    # the next read finds no torn end
    assert read(tmp_path) == ([1, 2, 3, 4], [])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def machine_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine restarts between writing and reading."""
    starts = itertools.count(1)
    monkeypatch.setattr(fsync_marker, "_boot", lambda: next(starts))


def test_a_changed_record_is_damage_while_the_machine_runs(tmp_path: Path) -> None:
    [path] = write(tmp_path, range(1, 4))
    flip(path, -1)
    with pytest.raises(JournalError, match=r"record 3 does not fit .* machine has not stopped"):
        read(tmp_path)


@pytest.mark.usefixtures("machine_restarted")
@pytest.mark.parametrize("at", [-1, 70])
def test_unsynced_records_are_cut_off_after_a_machine_restart(tmp_path: Path, at: int) -> None:
    [path] = write(tmp_path, range(1, 5), synced=1)
    flip(path, at)
    numbers, (warnings,) = read(tmp_path)
    assert numbers == ([1, 2, 3] if at < 0 else [1])
    assert "they were probably not on the disk when the machine stopped" in warnings
    assert warnings.endswith("with them goes record 3") == (at > 0)
    assert read(tmp_path) == (numbers, [])


@pytest.mark.usefixtures("machine_restarted")
def test_unreadable_synced_records_are_damage(tmp_path: Path) -> None:
    *_, path = write(tmp_path, range(1, 3), range(3, 6), synced=5)
    whole = path.read_bytes()
    flip(path, -1)
    with pytest.raises(JournalError, match=rf"damaged at byte .* {len(whole)} bytes of it were on"):
        read(tmp_path)
    # without the last record, or without all
    for size in (2 * len(whole) // 3, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(JournalError, match=rf"ends at byte {size}, and {len(whole)} bytes of"):
            read(tmp_path)
    path.unlink()
    with pytest.raises(JournalError, match=rf"{path} is damaged: it ends at byte 0"):
        read(tmp_path)
    path.write_bytes(whole)
    assert read(tmp_path) == ([1, 2, 3, 4, 5], [])


@pytest.mark.parametrize("damage", ["gone", "torn", "changed", "long"])
def test_a_damaged_fsync_marker_is_ignored(tmp_path: Path, damage: str) -> None:
    [path] = write(tmp_path, range(1, 4), synced=3)
    marker = tmp_path / "synced"
    data = marker.read_bytes()
    if damage == "gone":
        marker.unlink()
    else:
        changed = bytes([data[0] ^ 1]) + data[1:]
        marker.write_bytes({"torn": data[:-1], "changed": changed, "long": data + b"x"}[damage])
    flip(path, -1)
    assert read(tmp_path)[0] == [1, 2]


def test_recovered_records_are_synced_before_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    *_, last = write(tmp_path, range(1, 4), range(4, 6))
    assert read(tmp_path)[0] == [1, 2, 3, 4, 5]
    assert synced == [str(last)]


def test_an_abandoned_empty_file_is_ignored(tmp_path: Path) -> None:
    """A rotation failed, and later records are in the file before it."""
    write(tmp_path, range(1, 3), range(3, 3))
    (tmp_path / f"{2:020d}.journal").touch()
    (tmp_path / f"{9:020d}.journal").touch()
    assert read(tmp_path) == ([1, 2], [])


def test_a_torn_end_of_an_earlier_file_is_damage(tmp_path: Path) -> None:
    first, _ = write(tmp_path, range(1, 4), range(4, 6))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"damaged at byte .* another file follows it"):
        read(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), range(4, 6), range(6, 7))[1].unlink()
    with pytest.raises(JournalError, match="records 4 to 5 are missing"):
        read(tmp_path)


def test_a_read_error_of_the_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    [path] = write(tmp_path, range(1, 4))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(JournalError, match=rf"{path} cannot be read at byte 0: Input/output"):
        read(tmp_path)


def test_read_pages_leave_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = write(tmp_path, range(1, 400))
    monkeypatch.setattr(history_module, "_LET_GO_BYTES", 1000)
    monkeypatch.setattr(history_module, "_AHEAD_BYTES", 500)
    advised: list[tuple[int, int]] = []

    def advise(_: int, offset: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            advised.append((offset, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    assert read(tmp_path)[0] == list(range(1, 400))
    end = 0
    for offset, size in advised:
        assert offset == end
        assert size >= 1000
        end += size
    assert path.stat().st_size - 2000 < end <= path.stat().st_size


def test_an_abandoned_read_leaves_nothing_open(tmp_path: Path) -> None:
    write(tmp_path, range(1, 400))
    records = history(tmp_path, CODEC, 1, print)
    assert next(records).number == 1
    records.close()  # type: ignore[attr-defined]
    own = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    assert not [path for path in own if path.startswith(str(tmp_path))]
    assert not [one for one in threading.enumerate() if one.name.startswith("fleet-history")]


# Segment: sync, the page cache, and the fsync marker of a journal file.


def test_full_synced_pages_leave_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = mmap.PAGESIZE
    calls: list[tuple[int, ...]] = []
    fdatasync, posix_fadvise = os.fdatasync, os.posix_fadvise

    def sync(fd: int) -> None:
        calls.append(())
        fdatasync(fd)

    def advise(fd: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((offset, size))
        posix_fadvise(fd, offset, size, advice)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    segment = Segment(tmp_path, 1)
    written = bytes(range(256)) * (page // 64)
    unsynced = []
    for part in (written[:90], written[90 : 2 * page + 90], written[2 * page + 90 : 4 * page]):
        segment.write([part])
        unsynced.append(segment.unsynced)
        segment.sync()
        assert segment.unsynced == 0
    segment.close()
    assert unsynced == [90, 2 * page, 2 * page - 90]
    assert calls == [(), (0, 0), (), (0, 2 * page), (), (2 * page, 2 * page)]
    assert segment.path.read_bytes() == written


def test_concurrent_syncs_do_not_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sync that finishes later covers less data."""
    segment, fdatasync, syncing = Segment(tmp_path, 1), os.fdatasync, threading.Event()
    segment.write([bytes(3 * mmap.PAGESIZE)])
    second = threading.Thread(target=segment.sync)

    def sync(fd: int) -> None:
        fdatasync(fd)
        if not syncing.is_set():
            syncing.set()
            segment.write([bytes(3 * mmap.PAGESIZE)])
            second.start()
            # it may wait until this sync is done
            second.join(0.2)

    monkeypatch.setattr(os, "fdatasync", sync)
    segment.sync()
    second.join()
    assert segment.unsynced == 0
    segment.close()
    # a sync after close does nothing
    segment.sync()


def test_the_fsync_marker_follows_each_sync(tmp_path: Path) -> None:
    for first in (1, 5):
        segment = Segment(tmp_path, first)
        assert SyncedBytes.read(tmp_path) == SyncedBytes(first, 0, is_all_there=True)
        for size in (3, 6):
            segment.write([b"abc"])
            assert SyncedBytes.read(tmp_path).within(first) == size - 3
            segment.sync()
            assert SyncedBytes.read(tmp_path).within(first) == size
        assert SyncedBytes.read(tmp_path).within(first + 1) == 0
        segment.close()


def test_a_failed_fsync_marker_does_not_fail_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    segment = Segment(tmp_path, 1)
    monkeypatch.setattr(os, "pwrite", refuse)
    segment.write([b"abc"])
    segment.sync()
    segment.close()
    assert segment.unsynced == 0
    assert SyncedBytes.read(tmp_path).within(1) == 0
