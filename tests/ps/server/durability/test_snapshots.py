# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a server that goes on working, and of tables in two tiers."""

import dataclasses
import errno
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.restartable import IDS, RestartableCluster, rows
from tests.ps.serving import Worker, ids_of, opened, plan, rows_of, together

from fleetlight.errors import CheckpointError
from fleetlight.kernels import TieredRowTable
from fleetlight.ps import messages as m
from fleetlight.ps.journal import disk_full_retry
from fleetlight.ps.journal.folder import Folder, remains
from fleetlight.ps.journal.fsync_marker import SyncedBytes
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.plan import EntryPlan, Plan, RulePlan
from fleetlight.ps.resume import KEPT, OVER
from fleetlight.ps.server import pulls
from fleetlight.ps.server.checkpoints import checkpoint_handler
from fleetlight.ps.server.checkpoints.checkpoint_handler import CheckpointHandler
from fleetlight.ps.server.durability import durability as durability_module
from fleetlight.ps.server.durability.persistent_state import PersistentState
from fleetlight.ps.server.server import Server

# A snapshot replaces the log before it, completely or not at all.


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


# A server whose tables are mostly in files recovers what it had, to the bit.


TIERED_IDS = list(range(90))
OPTIONS = [{"lr": 0.1, "eps": 1e-8, "betas": (0.9, 0.99), "weight_decay": 0.0, "lr_decay": 0.0}]


COUNT = EntryPlan("count", 2.0)


def plan_of(mode: str, memory: int, **more_of_table: Any) -> Plan:
    settings = {"entry": COUNT, "rule": RulePlan("adam", {}), "memory": memory, **more_of_table}
    tables = [msgspec.structs.replace(table, **settings) for table in plan().tables]
    more = {"k_steps": 2} if mode == "geo" else {"staleness": 3} if mode == "async" else {}
    return plan(mode, tables=tables, **more)


def train(workers: list[Worker], mode: str, step: int) -> list[Any]:
    """One step of both workers; the replies."""
    random = np.random.default_rng(step)
    some = [np.unique(random.integers(0, len(TIERED_IDS), 30)).tolist() for _ in workers]
    replies: list[Any] = [worker.pull(0, ids) for worker, ids in zip(workers, some, strict=True)]
    values = [random.normal(size=len(ids)) for ids in some]
    if mode == "geo":
        for worker, ids, changes in zip(workers, some, values, strict=True):
            worker.sequence += 1
            exchange = m.GeoExchange(worker.sequence, 0, step, [0], dense=False)
            arrays = np.array(ids), rows_of(changes.tolist())
            replies.append(worker.say(exchange, *arrays, lane="push")[1][0].tolist())
        return replies
    pushes = [
        lambda w=w, i=i, v=v: w.push(step, {0: (i, v.tolist())}, options=OPTIONS)
        for w, i, v in zip(workers, some, values, strict=True)
    ]
    if mode == "sync":
        together(*pushes)
    else:
        for push in pushes:
            push()
    return replies


def is_tiered(server: Server) -> bool:
    assert server._service is not None
    table = server._service.state.tables[0]._rows
    return isinstance(table, TieredRowTable) and table._store.nbytes > 0  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
@pytest.mark.parametrize(
    "table",
    [{"entry": None, "max_rows": 80, "evict": "age"}, {}, {"max_rows": 80, "evict": "count"}],
    ids=["by age", "all rows", "by count"],
)
def test_a_killed_server_returns_with_all_rows(
    make_cluster: Any, mode: str, table: dict[str, Any]
) -> None:
    """Crashes after steps, snapshots during training and shrinks; another server never stops."""
    cluster = make_cluster(plan_of(mode, 1, **table))
    other = opened(plan_of(mode, 0, **table))
    steady = [Worker(other, index) for index in range(2)]
    for step in range(12):
        replies = train(cluster.workers, mode, step), train(steady, mode, step)
        assert replies[0] == replies[1]
        if step % 3 == 1:
            assert cluster.durability.snapshot()
        if step % 4 == 3:
            shrinks = [
                w.say(m.Shrink(0, 3, 0.0, 0.5, step))[0] for w in (cluster.workers[0], steady[0])
            ]
            assert shrinks[0] == shrinks[1]
        if step % 2:
            cluster.restart()
        found = [w.pull(0, TIERED_IDS, insert=False) for w in (cluster.workers[0], steady[0])]
        assert found[0] == found[1]
    assert is_tiered(cluster.server)
    assert cluster.server.metrics().rows == other.metrics().rows


def test_rows_are_beside_the_log_and_leave_no_files(tmp_path: Path) -> None:
    cluster = RestartableCluster(tmp_path / "kept", plan_of("async", 1))
    before = set(os.listdir(tmp_path / "kept"))
    cluster.workers[0].pull(0, TIERED_IDS)
    assert is_tiered(cluster.server)
    assert cluster.server._service is not None
    store = cluster.server._service.state.tables[0]._rows._store  # type: ignore[attr-defined]
    path = os.readlink(f"/proc/self/fd/{store._file}")
    assert path.startswith(f"{tmp_path}/kept/")
    assert path.endswith(" (deleted)")
    assert set(os.listdir(tmp_path / "kept")) == before
    cluster.close()


def test_a_job_resumes_with_another_limit_of_memory(tmp_path: Path) -> None:
    cluster = RestartableCluster(tmp_path / "kept", plan_of("async", 0))
    train(cluster.workers, "async", 0)
    before = cluster.workers[0].pull(0, TIERED_IDS, insert=False)
    for memory in (1, 0):
        changed = plan_of("async", memory)
        cluster.plan = msgspec.structs.replace(changed, table_folder=str(tmp_path / "rows"))
        cluster.restart()
        assert cluster.workers[0].pull(0, TIERED_IDS, insert=False) == before
    cluster.close()


def test_the_folder_of_the_strategy(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "rows"
    server = opened(msgspec.structs.replace(plan_of("async", 1), table_folder=str(folder)))
    Worker(server, 0).pull(0, TIERED_IDS)
    assert is_tiered(server)
    assert folder.is_dir()


@pytest.mark.parametrize("memory", [0, 1])
def test_rows_that_the_scores_of_another_table_admit(make_cluster: Any, memory: int) -> None:
    """Another server never stops."""
    entries = EntryPlan("show_click"), EntryPlan("score", 0.25, "users")
    tables = [
        msgspec.structs.replace(table, entry=entry, memory=memory)
        for table, entry in zip(plan().tables, entries, strict=True)
    ]
    cluster = make_cluster(plan("async", tables=tables))
    other = opened(plan("async", tables=tables))
    steady = Worker(other, 0)
    for step in range(12):
        random = np.random.default_rng(step)
        ids = np.unique(random.integers(0, len(TIERED_IDS), 40))
        shows, clicks = np.ones(len(ids), np.float32), (ids % 5 == 0).astype(np.float32)
        rows = rows_of(random.normal(size=len(ids)).tolist())
        for worker in (cluster.workers[0], steady):
            worker.pull(1, ids.tolist())
            worker.sequence += 1
            push = m.Push(
                sequence=worker.sequence,
                epoch=0,
                optimizer=0,
                step=step,
                phase=0,
                options=OPTIONS,
                tables=[m.TablePush(0, counted=True), m.TablePush(1)],
                dense=False,
            )
            worker.say(push, ids, rows, shows, clicks, ids, rows, lane="push")
            if step % 4 == 3:
                worker.say(m.Shrink(0, 1, 0.15, 0.9, step))
        if step % 3 == 1:
            assert cluster.durability.snapshot()
        if step % 2:
            cluster.restart()
        for table in range(2):
            found = [w.pull(table, TIERED_IDS, insert=False) for w in (cluster.workers[0], steady)]
            assert found[0] == found[1]
        assert cluster.server.metrics().rows == other.metrics().rows
    assert other._service is not None
    assert 0 < len(other._service.state.tables[1]) < len(other._service.state.tables[0])
