# SPDX-License-Identifier: Apache-2.0
"""A server that is asked to stop does not wait for workers that have not connected."""

from __future__ import annotations

import itertools

import pytest

from fleetlight.errors import StoppedError
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Roster


def test_a_stop_before_workers_connect_ends_the_server() -> None:
    clock = itertools.count(0.0, 4.0)
    presence = PresenceMonitor(Roster(0, 1, 2, "0.1"), 2, 300.0, lambda: next(clock))
    presence.call_stop()
    text = r"asked to stop, and the server has waited 10 s for worker 0 \(it never connected\), wo"
    with pytest.raises(StoppedError, match=text):
        presence.until_all_left(lambda: None)
    assert next(clock) < 200
