# SPDX-License-Identifier: Apache-2.0
"""TableLock: a piece of a save comes before later pushes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.ps.made_tables import LR, make, ones, some_ids

from fleetlight.kernels import RowTable
from fleetlight.ps.tables import table as table_module
from fleetlight.ps.tables.ordered_snapshot import OrderedSnapshot
from fleetlight.ps.tables.table_lock import TableLock


def until(condition: Callable[[], bool]) -> None:
    """Poll, with a deadline."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "no piece waits"
        time.sleep(1e-4)


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def holds(by: AbstractContextManager[Any], log: list[str], name: str) -> Callable[[], None]:
    """Holds a lock once."""

    def hold() -> None:
        with by:
            log.append(name)

    return hold


def test_the_owner_may_acquire_it_again_while_a_piece_waits() -> None:
    lock, log = TableLock(), []
    with lock, lock, lock.piece:
        waits = in_thread(holds(lock.piece, log, "piece"))
        until(lock._gate.locked)
        with lock, lock.piece, lock:
            log.append("owner")
    waits.join(30)
    assert log == ["owner", "piece"]


def test_a_waiting_piece_comes_before_later_calls() -> None:
    """The owner releases the lock and acquires it again at once."""
    lock, log = TableLock(), []
    for _ in range(50):
        with lock:
            waits = in_thread(holds(lock.piece, log, "piece"))
            until(lock._gate.locked)
        with lock:
            log.append("call")
        waits.join(30)
    assert log == 50 * ["piece", "call"]


def test_calls_and_pieces_exclude_each_other() -> None:
    lock, count = TableLock(), [0]

    def add(by: AbstractContextManager[Any]) -> None:
        for _ in range(300):
            with by:
                before = count[0]
                time.sleep(0)
                count[0] = before + 1

    threads = [in_thread(lambda by=by: add(by)) for by in (lock, lock, lock.piece, lock.piece)]
    for thread in threads:
        thread.join(60)
    assert count == [4 * 300]


def test_a_save_reads_its_pieces_ahead_of_later_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push ends as soon as a piece waits, and the next push begins at once."""
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 400)
    table, ids, log = make("adagrad"), some_ids(500), []
    table.pull(ids, insert=True)
    cut, pieces = table.cut(), -(-500 // (400 // (4 * 6)))
    read, push = OrderedSnapshot.read, RowTable.push

    def is_read() -> bool:
        return log.count("piece") == pieces

    def reads(*args: Any) -> Any:
        if not log:
            trains.start()
        log.append("piece")
        return read(*args)

    def pushes(*args: Any, **rest: Any) -> None:
        log.append("push")
        until(lambda: table.lock._gate.locked() or is_read())
        push(*args, **rest)

    def train() -> None:
        for step in itertools.takewhile(lambda _: not is_read(), itertools.count()):
            table.push(ids, ones(len(ids)), LR, step)

    monkeypatch.setattr(OrderedSnapshot, "read", reads)
    monkeypatch.setattr(RowTable, "push", pushes)
    trains = threading.Thread(target=train)
    table.save(cut, 0, tmp_path, "t.safetensors")
    trains.join(30)
    during = "".join(name[1] for name in log)
    assert during.count("i") == pieces
    assert "u" in during
    assert "uu" not in during[: during.rindex("i")]
