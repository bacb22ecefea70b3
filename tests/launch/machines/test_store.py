# SPDX-License-Identifier: Apache-2.0
"""torch's store, with an end to every wait."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from fleetlight.errors import LaunchError
from fleetlight.launch.job.spec import Meeting
from fleetlight.launch.machines import store
from fleetlight.launch.machines.store import Store, StoreLostError, bounded
from fleetlight.launch.processes.ports import Reservation

HOST = "127.0.0.1"


def test_what_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(StoreLostError, match=r"did not answer for 0.01 s"):
        bounded(release.wait, deadline_s=0.01)
    release.set()


def test_values_and_errors_come_through() -> None:
    assert bounded(lambda: 3) == 3
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"])


def free_meeting() -> Meeting:
    with contextlib.closing(Reservation(HOST)) as held:
        return Meeting(master=(HOST, held.port), min_nodes=2, max_nodes=2)


def test_a_store_served_here_and_found_from_elsewhere() -> None:
    meeting = free_meeting()
    assert not store.is_served(meeting)
    served = store.serve(meeting)
    assert served is not None
    assert store.is_served(meeting)
    assert store.serve(meeting) is None  # the port is taken now
    found: Store = store.connect(meeting)
    served.set("key", "value")
    assert not found.check(["key", "other"])
    assert found.get("key") == b"value"
    assert (found.add("count", 2), served.add("count", 1)) == (2, 3)


@pytest.fixture
def _silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's client waits for ever for a greeting."""
    release = threading.Event()
    monkeypatch.setattr(store, "_LEAST_S", 0.01)
    monkeypatch.setattr(store, "_client", lambda host, port, deadline_s: release.wait())
    yield
    release.set()


@pytest.mark.usefixtures("_silent")
def test_something_else_that_answers_is_named_within_the_deadline() -> None:
    with socket.create_server((HOST, 0)) as other:
        meeting = Meeting(master=other.getsockname(), min_nodes=2, max_nodes=2)
        who = f" but process {os.getpid()} " if sys.platform == "linux" else ""
        with pytest.raises(LaunchError, match=rf"is not a fleetrun{who}.* not answer for 0.02 s"):
            store.connect(meeting, left_s=0.02)


@pytest.mark.usefixtures("_silent")
def test_what_answers_on_another_machine_is_not_looked_for_here() -> None:
    with socket.create_server((HOST, 0)) as other:
        away = ("203.0.113.1", other.getsockname()[1])
        meeting = Meeting(master=away, min_nodes=2, max_nodes=2)
        with pytest.raises(LaunchError, match=r"is not a fleetrun: the store did not answer"):
            store.connect(meeting, left_s=0)
