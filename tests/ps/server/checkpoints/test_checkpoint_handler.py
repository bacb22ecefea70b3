# SPDX-License-Identifier: Apache-2.0
"""CheckpointHandler: a cut between two pushes, saved during training, loaded by any servers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.serving import OPTIONS, Worker, hello, ids_of, opened, plan, rows_of, team, together

from fleetlight.errors import CheckpointError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.server.checkpoints import checkpoint_handler
from fleetlight.ps.server.checkpoints.checkpoint_handler import FileTransfer
from fleetlight.ps.tables.table_file import TableReader
from fleetlight.ps.transport.interface import Connection

IDS = list(range(-50, 50))


def save(worker: Worker, folder: Path) -> m.Saved:
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text("")
    reply: m.Saved = worker.say(m.Save(str(folder), "token", 0))[0]
    return reply


def files(saved: m.Saved) -> list[tuple[int, str]]:
    return [(file.table, file.name) for file in saved.files]


def trained(mode: str = "async") -> Worker:
    worker = Worker(opened(plan(mode, workers=1)), 0, 1)
    worker.push(0, {0: (IDS, IDS), 1: ([5], [5])}, [1, 2, 3])
    return worker


def test_a_save_writes_the_cut_without_later_pushes(tmp_path: Path) -> None:
    worker = trained()
    worker.say(m.SnapshotRequest())
    worker.push(1, {0: ([1, 1000], [7, 7])}, [1, 1, 1])
    state, (dense, *_) = worker.say(m.FetchDense())
    saved = save(worker, tmp_path)
    assert [(f.table, f.rows) for f in saved.files] == [(0, 100), (1, 1)]
    # the high-water marks are of the cut, too, without the push after it
    assert saved.marks == [(0, 1, 0)]
    assert dense.tolist() == [0, -1, -2]
    assert isinstance(state, m.FetchedDense)
    target = Worker(opened(plan("async", workers=1)), 0, 1)
    target.say(m.Load(str(tmp_path), files(saved), epoch=1))
    assert target.pull(0, [1, -50, 1000]) == [-1, 50, 0]
    # without a cut, a save writes the current rows and dense values
    later = save(worker, tmp_path / "later")
    assert (later.files[0].rows, later.marks) == (101, [(0, 1, 1)])
    assert worker.say(m.FetchDense())[1][0].tolist() == [-1, -2, -3]


def test_other_servers_load_their_own_rows(tmp_path: Path) -> None:
    saved = save(trained(), tmp_path)
    servers = [
        Worker(opened(plan("async", workers=1, server_num=2), index=n), 0, 1, servers=2)
        for n in range(2)
    ]
    for worker in servers:
        worker.say(m.Load(str(tmp_path), files(saved), epoch=1))
    counts = [worker.server.metrics().rows["users"] for worker in servers]
    assert sum(counts) == len(IDS)
    assert min(counts) > 20
    rows = np.array([worker.pull(0, IDS, insert=False) for worker in servers])
    # each id is on one server only
    np.testing.assert_array_equal(rows.sum(0), -np.array(IDS))
    assert (rows == 0).sum() == len(IDS) + 1


def test_a_load_starts_an_epoch(tmp_path: Path) -> None:
    worker = trained()
    saved = save(worker, tmp_path)
    worker.push(1, {0: ([1], [1])})
    load = m.Load(str(tmp_path), files(saved), epoch=1)
    worker.say(load)
    assert worker.pull(0, [1]) == [-1]
    with pytest.raises(ProtocolError, match="pushed for epoch 0, but this server is in epoch 1"):
        worker.push(2)
    worker.epoch = 1
    # step numbers restart as well
    worker.push(0, {0: ([1], [1])})
    assert worker.pull(0, [1]) == [-2]
    assert worker.greet("control") == m.Welcome(0, 1)
    with pytest.raises(ProtocolError, match="epochs only grow"):
        worker.say(load)


def test_initial_values_do_not_replace_a_loaded_checkpoint(tmp_path: Path) -> None:
    worker = trained()
    saved, (state, arrays) = save(worker, tmp_path), worker.say(m.FetchDense())
    target = Worker(opened(plan("async", workers=1)), 0, 1)
    target.say(m.Load(str(tmp_path), files(saved), epoch=1))
    target.say(m.RestoreDense(state.state, state.scalars), *arrays)
    target.say(m.Fill([0], True), ids_of([1]), rows_of([99]), np.zeros(3, np.float32))
    assert target.pull(0, [1]) == [-1]
    assert target.dense() == [0, -1, -2]


def test_dense_optimizer_state_is_restored() -> None:
    momentum = [{**OPTIONS[0], "momentum": 0.5}]
    source, target = (Worker(opened(plan(workers=1)), 0, 1) for _ in range(2))
    source.push(0, {}, [1, 2, 4], options=momentum)
    state, arrays = source.say(m.FetchDense())
    target.say(m.RestoreDense(state.state, state.scalars), *arrays)
    for worker, step in ((source, 1), (target, 0)):
        worker.push(step, {}, [0, 0, 0], options=momentum)
    assert source.dense() == target.dense() == [-0.5, -2, -5]


def test_a_folder_that_is_not_shared_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"server 0 does not see .*shared file system"):
        trained().say(m.Save(str(tmp_path), "token", 0))


def test_an_unwritable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "table000.server000.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="table000"):
        save(trained(), tmp_path)


def test_a_cut_lies_between_two_pushes(tmp_path: Path) -> None:
    """Each push adds the same value to both tables, so they are equal in each cut."""
    workers = team(opened(plan("async")))

    def train(worker: Worker) -> None:
        for step in range(60):
            worker.push(step, {0: ([1], [1]), 1: ([1], [1])}, [1, 1, 1])

    def save_repeatedly(worker: Worker) -> list[Any]:
        found = []
        for number in range(5):
            worker.say(m.SnapshotRequest())
            dense = worker.say(m.FetchDense())[1][0].tolist()
            folder = tmp_path / str(number)
            saved = save(worker, folder)
            found.append((saved.marks, dense, read(saved, folder)))
        return found

    *trained_, saves = together(
        lambda: train(workers[0]), lambda: train(workers[1]), lambda: save_repeatedly(workers[0])
    )
    assert trained_ == [None, None]
    assert isinstance(saves, list), saves
    for marks, dense, rows in saves:
        pushes = sum(sequence + 1 for _, _, sequence in marks)
        assert rows == [-pushes, -pushes]
        assert dense == [1 - pushes] * 3


@pytest.mark.parametrize("kind", ["snapshot", "sweep"])
def test_pushes_do_not_wait_for_the_preparation_of_a_cut(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The first cut compiles kernels, which may take seconds."""
    worker = trained()
    pushed: list[Any] = []

    def push_meanwhile() -> None:
        thread = threading.Thread(target=lambda: pushed.append(worker.push(1, {}, [1, 1, 1])))
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "a push waits"

    monkeypatch.setattr(getattr(checkpoint_handler, kind), "get_ready", push_meanwhile)
    if kind == "snapshot":
        worker.say(m.SnapshotRequest())
    else:
        rows = worker.server._serving().checkpoints.snapshot_job()
        assert rows is not None
        rows.cut()
        rows.close()
    assert len(pushed) == 1


def read(saved: m.Saved, folder: Path) -> list[float]:
    target = Worker(opened(plan("async", workers=1)), 0, 1)
    target.say(m.Load(str(folder), files(saved), epoch=1))
    return [target.pull(0, [1])[0], target.pull(1, [1])[0]]


@pytest.mark.parametrize("folder", ["x" * 300, "a\0b"], ids=["long", "odd"])
def test_an_impossible_folder_name_is_an_unseen_folder(folder: str) -> None:
    server = opened(plan("async"))
    worker = Worker(server, 0)
    with pytest.raises(CheckpointError, match="does not see the file of worker 0"):
        worker.say(m.Save(folder, "token", 0))
    with pytest.raises(CheckpointError, match=r"does not see|cannot be read|not the file"):
        worker.say(m.Load(folder, [(0, "table")], 1))


def test_a_deleted_table_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TableReader(tmp_path / "gone")


def test_a_load_waits_for_a_snapshot_in_progress(tmp_path: Path) -> None:
    worker = trained()
    saved = save(worker, tmp_path)
    service = worker.server._service
    assert service is not None
    rows = service.checkpoints.snapshot_job()
    assert rows is not None
    rows.cut()
    table = service.state.tables[0]
    table._saving = True
    waits, wait_for = threading.Event(), service.checkpoints._lock.wait_for

    def notify(*of: Any) -> bool:
        waits.set()
        return wait_for(*of)

    service.checkpoints._lock.wait_for = notify  # type: ignore[method-assign]
    load = m.Load(str(tmp_path), files(saved), epoch=1)
    loading = threading.Thread(target=worker.say, args=(load,))
    loading.start()
    assert waits.wait(60)
    # pushes for the old values are refused once the load starts, not while it waits
    worker.push(1, {0: ([1], [1])})
    table._saving = False
    rows.close()
    loading.join()
    assert worker.pull(0, [1]) == [-1]
    worker.epoch = 1
    worker.push(2, {0: ([1], [1])})
    # the next snapshot may start
    assert service.checkpoints.snapshot_job() is not None


def test_a_cut_of_a_dead_worker_0_is_dropped() -> None:
    server = opened(plan("async", workers=1))
    service = server._service
    assert service is not None
    connections = [Connection("first incarnation"), Connection("second incarnation")]
    for incarnation, connection in enumerate(connections, 1):
        greeting = msgspec.structs.replace(
            hello(0, "control", 1), incarnation=incarnation, away_s=60.0
        )
        server(connection, greeting, [])
        assert service.checkpoints.snapshot_job() is not None
        service.checkpoints._written()
        server(connection, m.SnapshotRequest(), [])
        assert service.checkpoints.snapshot_job() is None
        server.gone(connection, None)


def chunk(text: bytes) -> np.ndarray:  # type: ignore[type-arg]
    return np.frombuffer(text, np.uint8)


def test_files_are_written_and_read_in_chunks() -> None:
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    for _ in range(2):  # a repeated chunk does no harm
        transfer.put("a", 3, chunk(b"def"))
    transfer.put("a", 6, chunk(b""))
    assert (transfer.folder / "a").read_bytes() == b"abcdef"
    assert [transfer.take("a", at, 4).tobytes() for at in (0, 4, 8)] == [b"abcd", b"ef", b""]
    transfer.clear()


def test_clear_removes_the_folder() -> None:
    transfer = FileTransfer(3)
    folder = transfer.folder
    transfer.put("a", 0, chunk(b"abc"))
    transfer.clear()
    assert not folder.exists()
    transfer.clear()
    assert transfer.folder != folder
    transfer.clear()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "..", "a/b", "a\0"])
def test_only_plain_file_names_are_accepted(name: str) -> None:
    transfer = FileTransfer(0)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        transfer.take(name, 0, 1)
    with pytest.raises(ProtocolError, match="expected a plain name"):
        transfer.put(name, 0, chunk(b"x"))
    transfer.clear()


def test_a_missing_file_is_an_error() -> None:
    transfer = FileTransfer(2)
    with pytest.raises(CheckpointError, match=r"server 2 could not transfer t of .*No such file"):
        transfer.take("t", 0, 1)
    transfer.clear()


@pytest.mark.parametrize("offset", [-1, 4, 1 << 62, (1 << 64) - 1])
def test_a_chunk_after_a_gap_is_refused(offset: int) -> None:
    """A sparse file of any size would be read whole by the next save or load."""
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    with pytest.raises(ProtocolError, match=f"at {offset}, expected an offset of 0 to 3"):
        transfer.put("a", offset, chunk(b"def"))
    assert (transfer.folder / "a").stat().st_size == 3
    transfer.clear()


def test_a_read_allocates_only_what_the_file_has() -> None:
    transfer = FileTransfer(0)
    transfer.put("a", 0, chunk(b"abc"))
    assert transfer.take("a", 1, (1 << 64) - 1).tobytes() == b"bc"
    assert transfer.take("a", (1 << 64) - 1, 5).tobytes() == b""
    with pytest.raises(ProtocolError, match="expected numbers from 0"):
        transfer.take("a", -1, 5)
    transfer.clear()
