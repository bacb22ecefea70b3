# SPDX-License-Identifier: Apache-2.0
"""A server starts from a checkpoint or from its own durable state, never from both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import Worker, closed_server, ids_of, open_up, plan, rows_of

from fleetlight.errors import CheckpointError, JournalError
from fleetlight.ps import messages as m
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.server import Server

PLAN = plan("async", workers=1)


def checkpoint() -> Iterator[Any]:
    """A row and dense values."""
    dense = np.array([7, 8, 9], np.float32)
    yield m.Fill([0], True, loaded=True), [ids_of([1]), rows_of([5]), dense]


def missing_checkpoint() -> Iterator[Any]:
    """A checkpoint that has been removed."""
    raise CheckpointError("there is no checkpoint")
    yield


def started(folder: Path, loaded: Any, *, job: str = "a job", **more: Any) -> Server:
    server = closed_server(1)
    open_up(server, PLAN, Durable(folder, job=job, **more), loaded)
    return server


def crash(durability: Durability) -> None:
    """Crash, as `RestartableCluster.restart` does."""
    durability._over.set()
    if durability._snapshots.is_alive():
        durability._snapshots.join()
    durability._folder._lock.release()


def values(server: Server) -> tuple[list[float], list[float]]:
    worker = Worker(server, 0, 1)
    return worker.pull(0, [1], insert=False), worker.dense()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("job", ["a job", "another"])
def test_a_restarted_server_does_not_read_the_checkpoint_again(
    tmp_path: Path, job: str, log: bool
) -> None:
    first = started(tmp_path, checkpoint, log=log)
    Worker(first, 0, 1).push(0, {0: ([1], [1])}, [1, 1, 1])
    assert first._durability is not None
    crash(first._durability)
    # by now the checkpoint may contain later pushes, or be deleted
    restarted = started(tmp_path, missing_checkpoint, job=job, log=log, resume=job != "a job")
    assert values(restarted) == (([4], [6, 7, 8]) if log else ([5], [7, 8, 9]))
    restarted.close()


def test_a_log_without_snapshot_outranks_the_checkpoint(tmp_path: Path) -> None:
    first = RestartableCluster(tmp_path, PLAN)
    first.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    crash(first.durability)
    restarted = started(tmp_path, missing_checkpoint, job="another", resume=True)
    assert values(restarted) == ([-1], [0, 0, 0])
    restarted.close()


@pytest.mark.parametrize("job", ["a job", "another"])
def test_a_crash_before_the_first_snapshot_reads_the_checkpoint_again(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed: list[Durability] = []

    def crash_in_snapshot(durability: Durability, *_: object) -> bool:
        crashed.append(durability)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Durability, "snapshot", crash_in_snapshot)
        with pytest.raises(KeyboardInterrupt):
            started(tmp_path, checkpoint)
    crash(crashed[0])
    # no reply depends on the lost state, so a new job may start and the same job may resume
    how = {} if job == "a job" else {"resume": True, "must_exist": True}
    restarted = started(tmp_path, checkpoint, job=job, **how)
    assert values(restarted) == ([5], [7, 8, 9])
    assert restarted._durability is not None
    assert restarted._durability.incarnation == 1
    restarted.close()


def test_an_unreadable_checkpoint_leaves_no_state(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        started(tmp_path, missing_checkpoint)
    with pytest.raises(JournalError, match="has no state to resume from"):
        started(tmp_path, checkpoint, job="another", resume=True, must_exist=True)
    server = started(tmp_path, checkpoint, job="another")
    assert values(server) == ([5], [7, 8, 9])
    server.close()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_initial_values_do_not_replace_trained_values(tmp_path: Path, mode: str, log: bool) -> None:
    """A job that resumes the state of an earlier job sends its initial values like any job."""
    first = RestartableCluster(tmp_path, plan(mode, workers=1), log=log)
    initial = [ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32)]
    first.workers[0].say(m.Fill([1], True), *initial)
    if mode == "geo":
        difference = [ids_of([1]), rows_of([-1]), np.array([-1, -1, -1], np.float32)]
        first.workers[0].say(m.GeoExchange(0, 0, 0, [1], dense=True), *difference, lane="push")
    else:
        first.workers[0].push(0, {1: ([1], [1])}, [1, 1, 1])
    if not log:
        assert first.durability.snapshot()
    first.workers[0].say(m.Leave("an error"))
    first.server.close()
    for job in ("another", "a third"):
        restarted = closed_server(1)
        open_up(restarted, first.plan, Durable(tmp_path, log=log, job=job, resume=True))
        worker = Worker(restarted, 0, 1)
        for _ in range(2):
            worker.say(m.Fill([1], True), ids_of([1, 9]), rows_of([0, 0]), np.zeros(3, np.float32))
        assert worker.pull(1, [1, 9], insert=False) == [4, 6]
        assert worker.dense() == [6, 7, 8]
        worker.say(m.Leave("an error"))
        restarted.close()


def test_a_server_that_crashed_without_values_accepts_initial_values(tmp_path: Path) -> None:
    RestartableCluster(tmp_path, plan("async")).close()
    server = closed_server()
    open_up(server, plan("async"), Durable(tmp_path, job="another", resume=True))
    worker = Worker(server, 0)
    worker.say(m.Fill([], True), np.array([7, 8, 9], np.float32))
    assert worker.dense() == [7, 8, 9]
    server.close()
