# SPDX-License-Identifier: Apache-2.0
"""A snapshot takes the place of what lies before it, as a whole or not at all."""

from __future__ import annotations

import collections
import dataclasses
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.ps.lives import IDS, Lives, rows
from tests.ps.serving import (
    ids_of,
    plan,
    rows_of,
    together,
)

from fleetlight.errors import CheckpointError
from fleetlight.ps import messages as m
from fleetlight.ps.journal import disk_full_retry as room
from fleetlight.ps.journal.folder import Folder, remains
from fleetlight.ps.journal.fsync_marker import SyncedBytes
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.resume import KEPT, OVER
from fleetlight.ps.server import pulls as reading
from fleetlight.ps.server.checkpoints import checkpoint_handler as keeping
from fleetlight.ps.server.checkpoints.checkpoint_handler import CheckpointHandler
from fleetlight.ps.server.durability import durability as durability_module
from fleetlight.ps.server.durability.persistent_state import PersistentState


def test_a_snapshot_replaces_what_lies_before_it(lives: Any) -> None:
    one = lives(plan("async"))
    for step in range(5):
        one.workers[0].push(step, {0: ([1, step], [1, 1])}, [1, 1, 1])
    before = rows(one.workers[0])
    assert one.durability.snapshot()
    assert len(segments(one.folder)) == 1
    one.workers[0].push(5, {0: ([1], [1])})
    one.die()
    before[IDS.index(1)] -= 1
    assert rows(one.workers[0]) == before
    assert one.workers[0].dense() == [-4, -4, -4]
    # a later one takes the place of the first
    assert one.durability.snapshot()
    assert len(list(one.folder.glob("rows-*"))) == 1
    one.die()
    assert rows(one.workers[0]) == before


def test_workers_do_not_wait_while_all_that_was_written_comes_to_the_disk(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lives(plan("async"))
    for step in range(5):
        one.workers[0].push(step, {0: ([1, step], [1, 1])})
    unsynced: list[int] = []
    sync = Segment.sync

    def synced(segment: Segment) -> None:
        is_at_rest = one.server._presence.changed._is_owned()
        unsynced.append(segment.unsynced if is_at_rest else 0)
        sync(segment)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "sync", synced)
        assert one.durability.snapshot()
    # before, amid and behind the rest
    assert unsynced == [0, 0, 0]


def test_what_was_read_back_counts_until_a_snapshot_lies_behind_it(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    one = lives(plan("async"), snapshot_bytes=20_000)
    worker, step = one.workers[0], 0
    while not one.durability._is_long():
        worker.push(step, {0: ([1, step], [1, 1])})
        step += 1
    for _ in range(2):
        one.die()
        assert one.durability._journal.size < 20_000
        assert one.durability._is_long()
    assert one.durability.snapshot()
    assert not one.durability._is_long()
    one.die()
    assert not one.durability._is_long()


def test_a_snapshot_takes_more_of_a_core_the_more_there_is_to_read_back(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    one = lives(plan("async"), snapshot_bytes=40_000)
    durability, journal = one.durability, one.durability._journal
    assert journal.size < 4_000
    assert durability._share(0) == durability_module._SHARE
    step = 0
    while journal.size < 20_000:
        one.workers[0].push(step, {0: ([1, step], [1, 1])})
        step += 1
    assert durability._share(0) == (journal.size / 40_000) ** 2
    assert durability._share(30_000) > 1
    # and all of it once somebody waits for it
    durability._over.set()
    assert durability._share(0) == 1


def test_a_snapshot_that_was_not_finished_does_not_count(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lives(plan("async"))
    one.workers[0].push(0, {0: ([1], [1])})

    def fail(*_: object) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("fleetlight.ps.journal.folder.Folder.complete", fail)
        with pytest.raises(OSError, match="luck"):
            one.durability.snapshot()
    one.workers[0].push(1, {0: ([1], [1])})
    one.die()
    assert one.workers[0].pull(0, [1]) == [-2]
    assert list(one.folder.glob("rows-*")) == []
    assert one.durability.snapshot()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_snapshot_holds_up_no_job_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    begun, may_go_on, written = threading.Event(), threading.Event(), list[bool]()

    def write(rows: Any, folder: Path, between: Any) -> list[Any]:
        begun.set()
        assert may_go_on.wait(60)
        between()
        written.append(True)
        return []

    monkeypatch.setattr(durability_module, "_LOOK_S", 0.001)
    monkeypatch.setattr(keeping._ServerSnapshotJob, "write", write)
    heard: list[Any] = []
    monkeypatch.setattr(durability_module.logger, "warning", lambda *text: heard.append(text))
    one = Lives(tmp_path / "kept", plan("async"), snapshot_s=0.0)
    assert begun.wait(60)
    set_over = one.durability._over.set

    def close() -> None:
        set_over()
        may_go_on.set()

    monkeypatch.setattr(one.durability._over, "set", close)
    if is_over:
        for worker in one.workers:
            worker.say(m.Leave())
    one.end()
    assert written == ([] if is_over else [True])
    assert heard == []
    assert remains(tmp_path / "kept").state == (OVER if is_over else KEPT)


def test_a_snapshot_that_fails_takes_no_room(lives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lives(plan("async"))
    one.workers[0].push(0, {0: ([1], [1])})
    assert one.durability.snapshot()
    table = one.server._service.state.tables[1]

    def full(*_: object) -> None:
        assert len(list(one.folder.glob("rows-*/*.safetensors"))) == 3
        raise OSError(errno.ENOSPC, "No space left on device")

    one.workers[0].push(1, {0: ([1], [1])})
    with monkeypatch.context() as patch:
        patch.setattr(table, "save", full)
        with pytest.raises(CheckpointError, match="No space left"):
            one.durability.snapshot()
    # the one before is there still
    assert len(list(one.folder.glob("rows-*"))) == 1
    one.die()
    assert one.workers[0].pull(0, [1]) == [-2]


def test_a_snapshot_that_a_life_needs_waits_for_room(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lives(plan("async"))
    one.workers[0].push(0, {0: ([1], [1])})
    table, refused = one.server._service.state.tables[1], list[int]()
    save = table.save

    def full(*arguments: Any) -> Any:
        if len(refused) < 3:
            refused.append(len(list(one.folder.glob("rows-*"))))
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*arguments)

    monkeypatch.setattr(room, "_TRY_EVERY_S", 0.0)
    monkeypatch.setattr(table, "save", full)
    one.durability.snapshot_now()
    # what was half written has gone before the next try
    assert refused == [1, 1, 1]
    one.die()
    assert one.workers[0].pull(0, [1]) == [-1]


def test_what_a_snapshot_needs_is_on_the_disk_before_it_counts(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lives(plan("async"))
    one.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    complete, known = Folder.complete, []

    def look(folder: Folder, first: int, files: Any) -> None:
        known.append(SyncedBytes.read(one.folder).within(first))
        assert known == [segments(one.folder)[-1][1].stat().st_size]
        complete(folder, first, files)

    monkeypatch.setattr(Folder, "complete", look)
    assert one.durability.snapshot()
    assert known[0] > 0


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_by_snapshots_alone_what_came_later_is_lost(tmp_path: Path, mode: str) -> None:
    one = Lives(tmp_path, plan(mode), log=False)

    def push(step: int) -> None:
        if mode == "geo":
            difference = [ids_of([1]), rows_of([-1])]
            one.workers[0].sequence += 1
            message = m.GeoExchange(one.workers[0].sequence, 0, step, [0], dense=False)
            one.workers[0].say(message, *difference, lane="push")
        elif mode == "async":
            one.workers[0].push(step, {0: ([1], [1])})
        else:
            gradients = {0: ([1], [1])}
            together(*(lambda w=w: w.push(step, gradients) for w in one.workers))

    for step in range(2):
        push(step)
    assert one.durability.snapshot()
    push(2)
    one.die()
    assert one.workers[0].pull(0, [1]) == [-2]
    # whoever is further goes on from there
    push(3)
    assert one.workers[0].pull(0, [1]) == [-3]
    one.end()


class Turn:
    """A log's turn that tells when a thread asks for it."""

    def __init__(self, turn: Any) -> None:
        self._turn = turn
        self.asked: dict[int, threading.Event] = collections.defaultdict(threading.Event)

    def __enter__(self) -> None:
        self.asked[threading.get_ident()].set()
        self._turn.acquire()

    def __exit__(self, *_: object) -> None:
        self._turn.release()


def test_rows_that_are_read_amid_a_cut_are_in_the_snapshot_or_behind_it(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lives(plan("async"))
    one.workers[0].pull(0, [1])
    log, journal, service = (
        one.server._log,
        one.durability._journal,
        one.server._service,
    )
    log.lock = turn = Turn(log.lock)
    rotate = journal.rotate

    def pull() -> None:
        # a request that was let in before the cut
        message = m.Pull([m.TablePull(0, insert=True)], dense=False)
        reading.pulled(service.state, log, message, [ids_of([2])])
        log.wait_on_disk()

    reader = threading.Thread(target=pull)

    def rotate_while_another_reads() -> Any:
        reader.start()
        # the row is there, and noted if nobody holds that up
        assert turn.asked[reader.ident or 0].wait(60)
        return rotate()

    monkeypatch.setattr(journal, "rotate", rotate_while_another_reads)
    assert one.durability.snapshot()
    reader.join()
    one.die()
    assert one.server.figures().rows == {"users": 2, "items": 0}


def test_a_snapshot_that_failed_leaves_its_log_to_be_read_back(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    monkeypatch.setattr(durability_module, "_FAILED_S", 0.0)
    one = lives(plan("async"), snapshot_bytes=20_000)
    step = 0
    while not one.durability._is_long():
        one.workers[0].push(step, {0: ([1, step], [1, 1])})
        step += 1

    def fail(*_: object) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("fleetlight.ps.journal.folder.Folder.complete", fail)
        assert one.durability._try_snapshot(one.durability._throttled_snapshot)
    assert one.durability._journal.size < 20_000
    assert one.durability._is_long()
    assert one.durability._try_snapshot(one.durability._throttled_snapshot)
    assert not one.durability._is_long()


class Waiting:
    """Checkpoints each of which comes while a snapshot is being written, and waits for it."""

    def __init__(self, kept: CheckpointHandler) -> None:
        self._keeping, self._waits = kept, threading.Event()
        self._wait_for = kept._lock.wait_for
        kept._lock.wait_for = self._wait  # type: ignore[method-assign]
        self.found: list[str] = []

    def _wait(self, *of: Any) -> bool:
        self._waits.set()
        return self._wait_for(*of)

    def write(self, rows: Any, folder: Path, between: Any) -> list[Any]:
        """In the place of `_ServerSnapshotJob.write`."""
        saving = threading.Thread(target=self._keeping.cut)
        self._waits.clear()
        saving.start()
        assert self._waits.wait(60)
        try:
            between()
        except Exception as error:
            self.found.append(type(error).__name__)
            raise
        else:
            self.found.append("written")
            return []
        finally:
            rows.close()
            saving.join()
            self._keeping.drop()


def test_a_snapshot_gives_way_to_a_checkpoint_but_not_to_two(
    lives: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    one = lives(plan("async"))
    waiting = Waiting(one.server._service.checkpoints)
    monkeypatch.setattr(keeping._ServerSnapshotJob, "write", lambda *of: waiting.write(*of))
    tried = [one.durability._try_snapshot(one.durability._throttled_snapshot) for _ in range(3)]
    assert waiting.found == ["_CheckpointWaitsError", "written", "_CheckpointWaitsError"]
    assert tried == [False, True, False]


def test_who_greets_while_a_server_takes_up_its_values_is_in_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what it begins with and the first change there is no room for one."""
    baseline, free = PersistentState.baseline, list[bool]()

    def look(kept: PersistentState) -> Any:
        def ask() -> None:
            free.append(kept.presence.changed.acquire(blocking=False))

        other = threading.Thread(target=ask)
        other.start()
        other.join()
        return baseline(kept)

    monkeypatch.setattr(PersistentState, "baseline", look)
    one = Lives(tmp_path, plan("async"))
    assert free == [False]
    one.end()


def test_a_server_that_dies_once_its_job_is_over_leaves_nothing_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Lives(tmp_path, plan("async"))
    one.workers[0].push(0, {0: ([1], [1])})
    for worker in one.workers:
        worker.say(m.Leave())
    durability = one.durability

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fleetlight.ps.journal.journal.Journal.close", die)
        with pytest.raises(KeyboardInterrupt):
            one.server.close()
    durability._folder._lock.release()
    # another job begins as if there had been none
    one.durable = dataclasses.replace(one.durable, job="another")
    one.server = one._start()
    assert one.durability.is_new
    one.end()
