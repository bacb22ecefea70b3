# SPDX-License-Identifier: Apache-2.0
"""A snapshot replaces the log before it, completely or not at all."""

from __future__ import annotations

import dataclasses
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.ps.restartable import IDS, RestartableCluster, rows
from tests.ps.serving import ids_of, plan, rows_of, together

from fleetlight.errors import CheckpointError
from fleetlight.ps import messages as m
from fleetlight.ps.journal import disk_full_retry
from fleetlight.ps.journal.folder import Folder, remains
from fleetlight.ps.journal.fsync_marker import SyncedBytes
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.resume import KEPT, OVER
from fleetlight.ps.server import pulls
from fleetlight.ps.server.checkpoints import checkpoint_handler
from fleetlight.ps.server.checkpoints.checkpoint_handler import CheckpointHandler
from fleetlight.ps.server.durability import durability as durability_module
from fleetlight.ps.server.durability.persistent_state import PersistentState


def test_a_snapshot_replaces_the_log_before_it(make_cluster: Any) -> None:
    cluster = make_cluster(plan("async"))
    for step in range(5):
        cluster.workers[0].push(step, {0: ([1, step], [1, 1])}, [1, 1, 1])
    before = rows(cluster.workers[0])
    assert cluster.durability.snapshot()
    assert len(segments(cluster.folder)) == 1
    cluster.workers[0].push(5, {0: ([1], [1])})
    cluster.restart()
    before[IDS.index(1)] -= 1
    assert rows(cluster.workers[0]) == before
    assert cluster.workers[0].dense() == [-4, -4, -4]
    # a later snapshot replaces the first
    assert cluster.durability.snapshot()
    assert len(list(cluster.folder.glob("rows-*"))) == 1
    cluster.restart()
    assert rows(cluster.workers[0]) == before


def test_workers_do_not_wait_for_the_fsync_before_a_snapshot(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan("async"))
    for step in range(5):
        cluster.workers[0].push(step, {0: ([1, step], [1, 1])})
    unsynced: list[int] = []
    sync = Segment.sync

    def synced(segment: Segment) -> None:
        is_at_rest = cluster.server._presence.changed._is_owned()
        unsynced.append(segment.unsynced if is_at_rest else 0)
        sync(segment)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "sync", synced)
        assert cluster.durability.snapshot()
    # the three syncs of a snapshot
    assert unsynced == [0, 0, 0]


def test_replayed_log_counts_until_the_next_snapshot(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    cluster = make_cluster(plan("async"), snapshot_bytes=20_000)
    worker, step = cluster.workers[0], 0
    while not cluster.durability._is_long():
        worker.push(step, {0: ([1, step], [1, 1])})
        step += 1
    for _ in range(2):
        cluster.restart()
        assert cluster.durability._journal.size < 20_000
        assert cluster.durability._is_long()
    assert cluster.durability.snapshot()
    assert not cluster.durability._is_long()
    cluster.restart()
    assert not cluster.durability._is_long()


def test_a_snapshot_speeds_up_as_the_log_grows(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    cluster = make_cluster(plan("async"), snapshot_bytes=40_000)
    durability, journal = cluster.durability, cluster.durability._journal
    assert journal.size < 4_000
    assert durability._share(0) == durability_module._SHARE
    step = 0
    while journal.size < 20_000:
        cluster.workers[0].push(step, {0: ([1, step], [1, 1])})
        step += 1
    assert durability._share(0) == (journal.size / 40_000) ** 2
    assert durability._share(30_000) > 1
    # the full core once the end of the server waits for it
    durability._over.set()
    assert durability._share(0) == 1


def test_an_unfinished_snapshot_is_ignored(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan("async"))
    cluster.workers[0].push(0, {0: ([1], [1])})

    def fail(*_: object) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("fleetlight.ps.journal.folder.Folder.complete", fail)
        with pytest.raises(OSError, match="luck"):
            cluster.durability.snapshot()
    cluster.workers[0].push(1, {0: ([1], [1])})
    cluster.restart()
    assert cluster.workers[0].pull(0, [1]) == [-2]
    assert list(cluster.folder.glob("rows-*")) == []
    assert cluster.durability.snapshot()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_snapshot_does_not_delay_the_end_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    started, may_continue, written = threading.Event(), threading.Event(), list[bool]()

    def write(rows: Any, folder: Path, between: Any) -> list[Any]:
        started.set()
        assert may_continue.wait(60)
        between()
        written.append(True)
        return []

    monkeypatch.setattr(durability_module, "_LOOK_S", 0.001)
    monkeypatch.setattr(checkpoint_handler._ServerSnapshotJob, "write", write)
    warnings: list[Any] = []
    monkeypatch.setattr(durability_module.logger, "warning", lambda *text: warnings.append(text))
    cluster = RestartableCluster(tmp_path / "kept", plan("async"), snapshot_s=0.0)
    assert started.wait(60)
    set_over = cluster.durability._over.set

    def close() -> None:
        set_over()
        may_continue.set()

    monkeypatch.setattr(cluster.durability._over, "set", close)
    if is_over:
        for worker in cluster.workers:
            worker.say(m.Leave())
    cluster.close()
    assert written == ([] if is_over else [True])
    assert warnings == []
    assert remains(tmp_path / "kept").state == (OVER if is_over else KEPT)


def test_a_failed_snapshot_leaves_no_files(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan("async"))
    cluster.workers[0].push(0, {0: ([1], [1])})
    assert cluster.durability.snapshot()
    table = cluster.server._service.state.tables[1]

    def full(*_: object) -> None:
        assert len(list(cluster.folder.glob("rows-*/*.safetensors"))) == 3
        raise OSError(errno.ENOSPC, "No space left on device")

    cluster.workers[0].push(1, {0: ([1], [1])})
    with monkeypatch.context() as patch:
        patch.setattr(table, "save", full)
        with pytest.raises(CheckpointError, match="No space left"):
            cluster.durability.snapshot()
    # the previous snapshot is still there
    assert len(list(cluster.folder.glob("rows-*"))) == 1
    cluster.restart()
    assert cluster.workers[0].pull(0, [1]) == [-2]


def test_a_required_snapshot_waits_for_disk_space(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan("async"))
    cluster.workers[0].push(0, {0: ([1], [1])})
    table, refused = cluster.server._service.state.tables[1], list[int]()
    save = table.save

    def full(*arguments: Any) -> Any:
        if len(refused) < 3:
            refused.append(len(list(cluster.folder.glob("rows-*"))))
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*arguments)

    monkeypatch.setattr(disk_full_retry, "_TRY_EVERY_S", 0.0)
    monkeypatch.setattr(table, "save", full)
    cluster.durability.snapshot_now()
    # the partial snapshot is deleted before the next attempt
    assert refused == [1, 1, 1]
    cluster.restart()
    assert cluster.workers[0].pull(0, [1]) == [-1]


def test_a_snapshot_is_complete_only_after_its_log_is_synced(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan("async"))
    cluster.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    complete, known = Folder.complete, []

    def look(folder: Folder, first: int, files: Any) -> None:
        known.append(SyncedBytes.read(cluster.folder).within(first))
        assert known == [segments(cluster.folder)[-1][1].stat().st_size]
        complete(folder, first, files)

    monkeypatch.setattr(Folder, "complete", look)
    assert cluster.durability.snapshot()
    assert known[0] > 0


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_without_a_log_pushes_after_a_snapshot_are_lost(tmp_path: Path, mode: str) -> None:
    cluster = RestartableCluster(tmp_path, plan(mode), log=False)

    def push(step: int) -> None:
        if mode == "geo":
            difference = [ids_of([1]), rows_of([-1])]
            cluster.workers[0].sequence += 1
            message = m.GeoExchange(cluster.workers[0].sequence, 0, step, [0], dense=False)
            cluster.workers[0].say(message, *difference, lane="push")
        elif mode == "async":
            cluster.workers[0].push(step, {0: ([1], [1])})
        else:
            gradients = {0: ([1], [1])}
            together(*(lambda w=w: w.push(step, gradients) for w in cluster.workers))

    for step in range(2):
        push(step)
    assert cluster.durability.snapshot()
    push(2)
    cluster.restart()
    assert cluster.workers[0].pull(0, [1]) == [-2]
    # a worker that is further continues from there
    push(3)
    assert cluster.workers[0].pull(0, [1]) == [-3]
    cluster.close()


class ObservedLock:
    """A log's lock that reports when a thread named reader asks for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.asked = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "reader":
            self.asked.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_rows_pulled_during_a_cut_are_in_the_snapshot_or_the_log(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan("async"))
    cluster.workers[0].pull(0, [1])
    log, journal, service = (
        cluster.server._log,
        cluster.durability._journal,
        cluster.server._service,
    )
    log.lock = observed = ObservedLock(log.lock)
    rotate = journal.rotate

    def pull() -> None:
        # a request that was admitted before the cut
        message = m.Pull([m.TablePull(0, insert=True)], dense=False)
        pulls.pulled(service.state, log, message, [ids_of([2])])
        log.wait_on_disk()

    reader = threading.Thread(target=pull, name="reader")

    def rotate_during_pull() -> Any:
        reader.start()
        # the row exists, and its record is written unless the lock is held
        assert observed.asked.wait(60)
        return rotate()

    monkeypatch.setattr(journal, "rotate", rotate_during_pull)
    assert cluster.durability.snapshot()
    reader.join()
    cluster.restart()
    assert cluster.server.metrics().rows == {"users": 2, "items": 0}


def test_after_a_failed_snapshot_the_log_still_counts(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    monkeypatch.setattr(durability_module, "_FAILED_S", 0.0)
    cluster = make_cluster(plan("async"), snapshot_bytes=20_000)
    step = 0
    while not cluster.durability._is_long():
        cluster.workers[0].push(step, {0: ([1, step], [1, 1])})
        step += 1

    def fail(*_: object) -> None:
        raise OSError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("fleetlight.ps.journal.folder.Folder.complete", fail)
        assert cluster.durability._try_snapshot(cluster.durability._throttled_snapshot)
    assert cluster.durability._journal.size < 20_000
    assert cluster.durability._is_long()
    assert cluster.durability._try_snapshot(cluster.durability._throttled_snapshot)
    assert not cluster.durability._is_long()


class CheckpointDuringSnapshot:
    """Requests a checkpoint during each write of a snapshot."""

    def __init__(self, handler: CheckpointHandler) -> None:
        self._handler, self._waits = handler, threading.Event()
        self._wait_for = handler._lock.wait_for
        handler._lock.wait_for = self._wait  # type: ignore[method-assign]
        self.outcomes: list[str] = []

    def _wait(self, *of: Any) -> bool:
        self._waits.set()
        return self._wait_for(*of)

    def write(self, rows: Any, folder: Path, between: Any) -> list[Any]:
        """Replace `_ServerSnapshotJob.write`."""
        saving = threading.Thread(target=self._handler.cut, args=(m.SnapshotRequest(),))
        self._waits.clear()
        saving.start()
        assert self._waits.wait(60)
        try:
            between()
        except Exception as error:
            self.outcomes.append(type(error).__name__)
            raise
        else:
            self.outcomes.append("written")
            return []
        finally:
            rows.close()
            saving.join()
            self._handler.drop()


def test_a_snapshot_yields_to_one_checkpoint_but_not_to_two(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability_module, "_LOOK_S", 600.0)
    cluster = make_cluster(plan("async"))
    checkpoints = CheckpointDuringSnapshot(cluster.server._service.checkpoints)
    monkeypatch.setattr(
        checkpoint_handler._ServerSnapshotJob, "write", lambda *of: checkpoints.write(*of)
    )
    results = [
        cluster.durability._try_snapshot(cluster.durability._throttled_snapshot) for _ in range(3)
    ]
    assert checkpoints.outcomes == ["_CheckpointWaitsError", "written", "_CheckpointWaitsError"]
    assert results == [False, True, False]


def test_the_membership_lock_is_held_while_the_baseline_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker could arrive between the baseline and the first log record."""
    baseline, free = PersistentState.baseline, list[bool]()

    def look(state: PersistentState) -> Any:
        def ask() -> None:
            free.append(state.presence.changed.acquire(blocking=False))

        other = threading.Thread(target=ask)
        other.start()
        other.join()
        return baseline(state)

    monkeypatch.setattr(PersistentState, "baseline", look)
    cluster = RestartableCluster(tmp_path, plan("async"))
    assert free == [False]
    cluster.close()


def test_a_crash_after_the_end_of_a_job_leaves_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RestartableCluster(tmp_path, plan("async"))
    cluster.workers[0].push(0, {0: ([1], [1])})
    for worker in cluster.workers:
        worker.say(m.Leave())
    durability = cluster.durability

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fleetlight.ps.journal.journal.Journal.close", crash)
        with pytest.raises(KeyboardInterrupt):
            cluster.server.close()
    durability._folder._lock.release()
    # another job starts as in an empty folder
    cluster.durable = dataclasses.replace(cluster.durable, job="another")
    cluster.server = cluster._start()
    assert cluster.durability.is_new
    cluster.close()
