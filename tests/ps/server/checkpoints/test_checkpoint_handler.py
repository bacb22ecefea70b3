# SPDX-License-Identifier: Apache-2.0
"""Keeping: a cut between two pushes, written while training goes on, read by other servers."""

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
from fleetlight.ps.server.checkpoints import checkpoint_handler as keeping
from fleetlight.ps.tables.table_file import TableReader
from fleetlight.ps.transport.interface import Connection

IDS = list(range(-50, 50))


def save(worker: Worker, folder: Path) -> m.Saved:
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text("")
    answer: m.Saved = worker.say(m.Save(str(folder), "token", 0))[0]
    return answer


def files(saved: m.Saved) -> list[tuple[int, str]]:
    return [(file.table, file.name) for file in saved.files]


def trained(mode: str = "async") -> Worker:
    worker = Worker(opened(plan(mode, workers=1)), 0, 1)
    worker.push(0, {0: (IDS, IDS), 1: ([5], [5])}, [1, 2, 3])
    return worker


def test_a_save_writes_the_cut_and_not_what_came_after(tmp_path: Path) -> None:
    worker = trained()
    worker.say(m.SnapshotRequest())
    worker.push(1, {0: ([1, 1000], [7, 7])}, [1, 1, 1])
    state, (dense, *_) = worker.say(m.FetchDense())
    saved = save(worker, tmp_path)
    assert [(f.table, f.rows) for f in saved.files] == [(0, 100), (1, 1)]
    # the marks are of the cut, too: the push after it is not in it
    assert saved.marks == [(0, 1, 0)]
    assert dense.tolist() == [0, -1, -2]
    assert isinstance(state, m.FetchedDense)
    other = Worker(opened(plan("async", workers=1)), 0, 1)
    other.say(m.Load(str(tmp_path), files(saved), epoch=1))
    assert other.pull(0, [1, -50, 1000]) == [-1, 50, 0]
    # without a cut it is as it is now, and so is the dense part
    later = save(worker, tmp_path / "later")
    assert (later.files[0].rows, later.marks) == (101, [(0, 1, 1)])
    assert worker.say(m.FetchDense())[1][0].tolist() == [-1, -2, -3]


def test_other_servers_read_their_own_rows(tmp_path: Path) -> None:
    saved = save(trained(), tmp_path)
    two = [
        Worker(opened(plan("async", workers=1, server_num=2), index=n), 0, 1, servers=2)
        for n in range(2)
    ]
    for worker in two:
        worker.say(m.Load(str(tmp_path), files(saved), epoch=1))
    counts = [worker.server.figures().rows["users"] for worker in two]
    assert sum(counts) == len(IDS)
    assert min(counts) > 20
    rows = np.array([worker.pull(0, IDS, insert=False) for worker in two])
    # an id is with one of them, the other knows nothing of it
    np.testing.assert_array_equal(rows.sum(0), -np.array(IDS))
    assert (rows == 0).sum() == len(IDS) + 1


def test_a_load_begins_an_epoch(tmp_path: Path) -> None:
    worker = trained()
    saved = save(worker, tmp_path)
    worker.push(1, {0: ([1], [1])})
    load = m.Load(str(tmp_path), files(saved), epoch=1)
    worker.say(load)
    assert worker.pull(0, [1]) == [-1]
    with pytest.raises(ProtocolError, match="pushed for epoch 0, but this server is in epoch 1"):
        worker.push(2)
    worker.epoch = 1
    # the steps begin anew as well
    worker.push(0, {0: ([1], [1])})
    assert worker.pull(0, [1]) == [-2]
    assert worker.greet("control") == m.Welcome(0, 1)
    with pytest.raises(ProtocolError, match="epochs only grow"):
        worker.say(load)


def test_a_loaded_checkpoint_is_worth_more_than_first_values(tmp_path: Path) -> None:
    worker = trained()
    saved, (state, arrays) = save(worker, tmp_path), worker.say(m.FetchDense())
    other = Worker(opened(plan("async", workers=1)), 0, 1)
    other.say(m.Load(str(tmp_path), files(saved), epoch=1))
    other.say(m.RestoreDense(state.state, state.scalars), *arrays)
    other.say(m.Fill([0], True), ids_of([1]), rows_of([99]), np.zeros(3, np.float32))
    assert other.pull(0, [1]) == [-1]
    assert other.dense() == [0, -1, -2]


def test_the_state_of_dense_parameters_comes_back() -> None:
    momentum = [{**OPTIONS[0], "momentum": 0.5}]
    one, two = (Worker(opened(plan(workers=1)), 0, 1) for _ in range(2))
    one.push(0, {}, [1, 2, 4], options=momentum)
    state, arrays = one.say(m.FetchDense())
    two.say(m.RestoreDense(state.state, state.scalars), *arrays)
    for worker, step in ((one, 1), (two, 0)):
        worker.push(step, {}, [0, 0, 0], options=momentum)
    assert one.dense() == two.dense() == [-0.5, -2, -5]


def test_a_folder_that_is_not_the_same_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"server 0 does not see .*shared file system"):
        trained().say(m.Save(str(tmp_path), "token", 0))


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "table000.server000.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="table000"):
        save(trained(), tmp_path)


def test_a_cut_lies_between_two_pushes(tmp_path: Path) -> None:
    """Every push brings the same number to both tables, so a cut must find them equal."""
    workers = team(opened(plan("async")))

    def train(worker: Worker) -> None:
        for step in range(60):
            worker.push(step, {0: ([1], [1]), 1: ([1], [1])}, [1, 1, 1])

    def keep(worker: Worker) -> list[Any]:
        found = []
        for number in range(5):
            worker.say(m.SnapshotRequest())
            dense = worker.say(m.FetchDense())[1][0].tolist()
            folder = tmp_path / str(number)
            saved = save(worker, folder)
            found.append((saved.marks, dense, read(saved, folder)))
        return found

    *trained_, kept = together(
        lambda: train(workers[0]), lambda: train(workers[1]), lambda: keep(workers[0])
    )
    assert trained_ == [None, None]
    assert isinstance(kept, list), kept
    for marks, dense, rows in kept:
        pushes = sum(sequence + 1 for _, _, sequence in marks)
        assert rows == [-pushes, -pushes]
        assert dense == [1 - pushes] * 3


@pytest.mark.parametrize("kind", ["snapshot", "sweep"])
def test_nobody_waits_while_a_cut_is_prepared(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What it compiles the first time may take seconds."""
    worker = trained()
    pushed: list[Any] = []

    def push_meanwhile() -> None:
        thread = threading.Thread(target=lambda: pushed.append(worker.push(1, {}, [1, 1, 1])))
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "a push waits"

    monkeypatch.setattr(getattr(keeping, kind), "get_ready", push_meanwhile)
    if kind == "snapshot":
        worker.say(m.SnapshotRequest())
    else:
        rows = worker.server._serving().checkpoints.snapshot_job()
        assert rows is not None
        rows.cut()
        rows.close()
    assert len(pushed) == 1


def read(saved: m.Saved, folder: Path) -> list[float]:
    other = Worker(opened(plan("async", workers=1)), 0, 1)
    other.say(m.Load(str(folder), files(saved), epoch=1))
    return [other.pull(0, [1])[0], other.pull(1, [1])[0]]


@pytest.mark.parametrize("folder", ["x" * 300, "a\0b"], ids=["long", "odd"])
def test_a_folder_that_no_system_takes_is_one_that_is_not_there(folder: str) -> None:
    server = opened(plan("async"))
    worker = Worker(server, 0)
    with pytest.raises(CheckpointError, match="does not see the file of worker 0"):
        worker.say(m.Save(folder, "token", 0))
    with pytest.raises(CheckpointError, match=r"does not see|cannot be read|not the file"):
        worker.say(m.Load(folder, [(0, "table")], 1))


def test_a_file_that_is_gone_meanwhile_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TableReader(tmp_path / "gone")


def test_a_load_waits_for_a_snapshot_that_is_being_written(tmp_path: Path) -> None:
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

    def told(*of: Any) -> bool:
        waits.set()
        return wait_for(*of)

    service.checkpoints._lock.wait_for = told  # type: ignore[method-assign]
    load = m.Load(str(tmp_path), files(saved), epoch=1)
    loading = threading.Thread(target=worker.say, args=(load,))
    loading.start()
    assert waits.wait(60)
    # pushes for older values are refused from the load on, not from the wait on
    worker.push(1, {0: ([1], [1])})
    table._saving = False
    rows.close()
    loading.join()
    assert worker.pull(0, [1]) == [-1]
    worker.epoch = 1
    worker.push(2, {0: ([1], [1])})
    # a snapshot may come again
    assert service.checkpoints.snapshot_job() is not None


def test_a_cut_that_worker_0_has_died_over_is_let_go_of() -> None:
    server = opened(plan("async", workers=1))
    service = server._service
    assert service is not None
    connections = [Connection("one life"), Connection("the next")]
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
