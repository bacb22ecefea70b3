# SPDX-License-Identifier: Apache-2.0
"""The launcher that serves the store leaves last."""

import signal
import time

import pytest
from tests.launch.machines.doubles import Store

from fleetlight.launch.machines import connected_machines
from fleetlight.launch.machines.connected_machines import serve_until_others_leave
from fleetlight.launch.machines.exchanged.heartbeats import SILENT_S, Heartbeats
from fleetlight.launch.processes.interrupts import Interrupts

HOUR_S = 3600.0


class SlowGoodbye(Store):
    """A store in which launcher 2 leaves late."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.goodbye_at = 3
        self.interrupt_at = 0
        self.interrupts = Interrupts()

    def check(self, keys: list[str]) -> bool:
        if keys == ["goodbye/2"]:
            self.asked += 1
            if self.asked == self.goodbye_at:
                self.set("goodbye/2", "")
            if self.asked == self.interrupt_at:
                self.interrupts.seen.append(signal.SIGINT)
        return super().check(keys)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_machines, "_LOOK_S", 0.0)


def served(store: SlowGoodbye) -> Heartbeats:
    """Node 0, whose heartbeat came before launcher 2 joined."""
    now = time.monotonic()
    host = Heartbeats(store, "a", now)
    host.beat(now)
    Heartbeats(store, "b", now).beat(now)
    host.leave()
    return host


def test_store_waits_for_a_launcher_that_joined_late() -> None:
    store = SlowGoodbye()
    serve_until_others_leave(served(store), [1, 2], HOUR_S, store.interrupts)
    assert store.asked == 3


def test_each_launcher_leaves_independently() -> None:
    store = SlowGoodbye()
    host = served(store)
    Heartbeats(store, "c", time.monotonic()).leave()
    serve_until_others_leave(host, [1, 2], HOUR_S, store.interrupts)
    assert store.asked == 3


def test_silent_launcher_does_not_delay_the_store() -> None:
    store = SlowGoodbye()
    host = served(store)
    host.poll(time.monotonic() - 2 * SILENT_S)
    serve_until_others_leave(host, [1, 2], HOUR_S, store.interrupts)
    assert store.asked == 0


def test_launchers_outside_the_job_get_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_machines, "STRANGERS_S", 0.0)
    for members, asked in (([1], 1), ([1, 2], 3)):
        store = SlowGoodbye()
        serve_until_others_leave(served(store), members, HOUR_S, store.interrupts)
        assert store.asked == asked


def test_wait_ends_at_the_deadline() -> None:
    store = SlowGoodbye()
    serve_until_others_leave(served(store), [1, 2], 0.0, store.interrupts)
    assert store.asked == 1


def test_only_another_interrupt_ends_the_wait() -> None:
    store = SlowGoodbye()
    store.goodbye_at, store.interrupt_at = 10, 5
    store.interrupts.seen.append(signal.SIGINT)
    serve_until_others_leave(served(store), [1, 2], HOUR_S, store.interrupts)
    assert store.asked == 5
