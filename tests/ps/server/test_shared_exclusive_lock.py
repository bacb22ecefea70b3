# SPDX-License-Identifier: Apache-2.0
"""SharedExclusiveLock: many shared holders, or one exclusive holder."""

from __future__ import annotations

import threading

import msgspec
import pytest
from tests.ps.gates import called
from tests.ps.serving import opened, plan, team

from fleetlight.errors import DeadlineError
from fleetlight.ps import messages as m
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock


def test_shared_holders_do_not_block_each_other() -> None:
    values_lock = SharedExclusiveLock(5)
    with values_lock.shared(), values_lock.shared():
        pass
    with values_lock.exclusive():
        pass
    with values_lock.shared():
        pass


def test_exclusive_waits_for_shared_holders() -> None:
    values_lock = SharedExclusiveLock(0.02)
    with (
        values_lock.shared(),
        pytest.raises(DeadlineError, match=r"0\.02 s for the pushes in progress"),
    ):
        values_lock.exclusive().__enter__()
    # a waiter that timed out does not block others
    with values_lock.shared():
        pass


def test_no_other_holder_enters_while_one_is_exclusive() -> None:
    values_lock = SharedExclusiveLock(0.02)
    with values_lock.exclusive():
        with pytest.raises(DeadlineError, match="a push waited"):
            values_lock.shared().__enter__()
        with pytest.raises(DeadlineError, match="for another one"):
            values_lock.exclusive().__enter__()


def test_shared_waits_until_the_exclusive_holder_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    values_lock, inside, seen = SharedExclusiveLock(20), threading.Event(), []

    def enter_shared() -> None:
        with values_lock.shared():
            inside.set()
            seen.append("shared")

    with values_lock.exclusive():
        waits = called(values_lock, "_wait", monkeypatch)
        thread = threading.Thread(target=enter_shared)
        thread.start()
        assert waits.wait(20)
        assert not inside.wait(0.2)
        seen.append("exclusive")
    thread.join(20)
    assert seen == ["exclusive", "shared"]


@pytest.mark.parametrize("message", [m.Fill([], False), m.Shrink(0, 0, 0.0, 1.0)])
def test_fill_and_shrink_take_the_lock_shared(
    message: m.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPlan("count", 2.0)
    tables = [msgspec.structs.replace(table, entry=entry) for table in plan().tables]
    server = opened(plan("async", tables=tables))
    worker, _ = team(server)
    with server._values_lock.exclusive():
        waits = called(server._values_lock, "_wait", monkeypatch)
        changing = threading.Thread(target=lambda: worker.say(message))
        changing.start()
        assert waits.wait(20)
        changing.join(0.2)
        assert changing.is_alive()
    changing.join(20)
    assert not changing.is_alive()
