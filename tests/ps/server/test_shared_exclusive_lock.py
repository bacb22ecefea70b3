# SPDX-License-Identifier: Apache-2.0
"""SharedExclusiveLock: many pass, one is alone."""

from __future__ import annotations

import threading

import msgspec
import pytest
from tests.ps.serving import opened, plan, team

from fleetlight.errors import DeadlineError
from fleetlight.ps import messages as m
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock


def test_many_pass_at_a_time() -> None:
    values_lock = SharedExclusiveLock(5)
    with values_lock.shared(), values_lock.shared():
        pass
    with values_lock.exclusive():
        pass
    with values_lock.shared():
        pass


def test_nobody_is_alone_while_somebody_passes() -> None:
    values_lock = SharedExclusiveLock(0.02)
    with (
        values_lock.shared(),
        pytest.raises(DeadlineError, match=r"0\.02 s for the pushes in progress"),
    ):
        values_lock.exclusive().__enter__()
    # who gave up holds nobody up
    with values_lock.shared():
        pass


def test_nobody_passes_while_one_is_alone() -> None:
    values_lock = SharedExclusiveLock(0.02)
    with values_lock.exclusive():
        with pytest.raises(DeadlineError, match="a push waited"):
            values_lock.shared().__enter__()
        with pytest.raises(DeadlineError, match="for another one"):
            values_lock.exclusive().__enter__()


def test_being_alone_is_waited_for_and_ends() -> None:
    values_lock, inside, seen = SharedExclusiveLock(20), threading.Event(), []

    def passer() -> None:
        with values_lock.shared():
            inside.set()
            seen.append("passed")

    with values_lock.exclusive():
        thread = threading.Thread(target=passer)
        thread.start()
        assert not inside.is_set()
        seen.append("alone")
    thread.join(20)
    assert seen == ["alone", "passed"]


@pytest.mark.parametrize("what", [m.Fill([], False), m.Shrink(0, 0, 0.0, 1.0)])
def test_a_server_passes_it_with_first_values_and_when_it_shrinks(what: m.Message) -> None:
    entry = EntryPlan("count", 2.0)
    tables = [msgspec.structs.replace(table, entry=entry) for table in plan().tables]
    server = opened(plan("async", tables=tables))
    worker, _ = team(server)
    with server._values_lock.exclusive():
        changing = threading.Thread(target=lambda: worker.say(what))
        changing.start()
        changing.join(0.2)
        assert changing.is_alive()
    changing.join(20)
    assert not changing.is_alive()
