# SPDX-License-Identifier: Apache-2.0
"""A server begins with a checkpoint, or with what an earlier life has left; never with both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.server.durability.test_durability import Lives
from tests.ps.serving import Worker, closed_server, ids_of, open_up, plan, rows_of

from fleetlight.errors import CheckpointError, JournalError
from fleetlight.ps import messages as m
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.server import Server

PLAN = plan("async", workers=1)


def saved() -> Iterator[Any]:
    """A row and dense values."""
    dense = np.array([7, 8, 9], np.float32)
    yield m.Fill([0], True, loaded=True), [ids_of([1]), rows_of([5]), dense]


def gone() -> Iterator[Any]:
    """It has been removed."""
    raise CheckpointError("there is no checkpoint")
    yield


def begun(folder: Path, loaded: Any, *, job: str = "a job", **more: Any) -> Server:
    server = closed_server(1)
    open_up(server, PLAN, Durable(folder, job=job, **more), loaded)
    return server


def die(durability: Durability) -> None:
    """As in `Lives`."""
    durability._over.set()
    if durability._snapshots.is_alive():
        durability._snapshots.join()
    durability._folder._lock.release()


def values(server: Server) -> tuple[list[float], list[float]]:
    worker = Worker(server, 0, 1)
    return worker.pull(0, [1], insert=False), worker.dense()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("job", ["a job", "another"])
def test_a_checkpoint_is_read_in_the_first_life_alone(tmp_path: Path, job: str, log: bool) -> None:
    one = begun(tmp_path, saved, log=log)
    Worker(one, 0, 1).push(0, {0: ([1], [1])}, [1, 1, 1])
    assert one._durability is not None
    die(one._durability)
    # by then it may have all that was pushed, or be gone
    again = begun(tmp_path, gone, job=job, log=log, resume=job != "a job")
    assert values(again) == (([4], [6, 7, 8]) if log else ([5], [7, 8, 9]))
    again.close()


def test_nor_is_it_read_where_there_is_no_snapshot_yet(tmp_path: Path) -> None:
    one = Lives(tmp_path, PLAN)
    one.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    die(one.durability)
    again = begun(tmp_path, gone, job="another", resume=True)
    assert values(again) == ([-1], [0, 0, 0])
    again.close()


@pytest.mark.parametrize("job", ["a job", "another"])
def test_who_died_before_all_of_it_was_written_reads_it_anew(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[Durability] = []

    def dies(durability: Durability, *_: object) -> bool:
        died.append(durability)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Durability, "snapshot", dies)
        with pytest.raises(KeyboardInterrupt):
            begun(tmp_path, saved)
    die(died[0])
    # nobody was told anything by it, so it stands in nobody's way, and is something to go on from
    how = {} if job == "a job" else {"resume": True, "must_exist": True}
    again = begun(tmp_path, saved, job=job, **how)
    assert values(again) == ([5], [7, 8, 9])
    assert again._durability is not None
    assert again._durability.incarnation == 1
    again.close()


def test_a_checkpoint_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        begun(tmp_path, gone)
    with pytest.raises(JournalError, match="has no state to resume from"):
        begun(tmp_path, saved, job="another", resume=True, must_exist=True)
    server = begun(tmp_path, saved, job="another")
    assert values(server) == ([5], [7, 8, 9])
    server.close()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_values_that_were_trained_are_worth_more_than_first_values(
    tmp_path: Path, mode: str, log: bool
) -> None:
    """A job that goes on with what an earlier one has left begins as every job does."""
    one = Lives(tmp_path, plan(mode, workers=1), log=log)
    first = [ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32)]
    one.workers[0].say(m.Fill([1], True), *first)
    if mode == "geo":
        difference = [ids_of([1]), rows_of([-1]), np.array([-1, -1, -1], np.float32)]
        one.workers[0].say(m.GeoExchange(0, 0, 0, [1], dense=True), *difference, lane="push")
    else:
        one.workers[0].push(0, {1: ([1], [1])}, [1, 1, 1])
    if not log:
        assert one.durability.snapshot()
    one.workers[0].say(m.Leave("an error"))
    one.server.close()
    for job in ("another", "a third"):
        again = closed_server(1)
        open_up(again, one.plan, Durable(tmp_path, log=log, job=job, resume=True))
        worker = Worker(again, 0, 1)
        for _ in range(2):
            worker.say(m.Fill([1], True), ids_of([1, 9]), rows_of([0, 0]), np.zeros(3, np.float32))
        assert worker.pull(1, [1, 9], insert=False) == [4, 6]
        assert worker.dense() == [6, 7, 8]
        worker.say(m.Leave("an error"))
        again.close()


def test_what_died_before_it_had_first_values_takes_them(tmp_path: Path) -> None:
    Lives(tmp_path, plan("async")).end()
    server = closed_server()
    open_up(server, plan("async"), Durable(tmp_path, job="another", resume=True))
    worker = Worker(server, 0)
    worker.say(m.Fill([], True), np.array([7, 8, 9], np.float32))
    assert worker.dense() == [7, 8, 9]
    server.close()
