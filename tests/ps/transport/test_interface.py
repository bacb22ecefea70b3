# SPDX-License-Identifier: Apache-2.0
"""The channel that stays in one process behaves as one over a socket."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ps.transport.doubles import PULL, Desk

from fleetlight.errors import PlanError
from fleetlight.ps.messages import Done, Heartbeat, Leave, Pulled
from fleetlight.ps.transport import Channel, MemoryChannel


def test_arrays_pass_by_reference() -> None:
    channel: Channel = MemoryChannel(Desk())
    sent = np.arange(3)
    answer = channel.call(PULL, [sent])
    assert answer.message == Pulled(1, 1)
    assert answer.arrays[0] is sent


def test_errors_are_raised_as_they_are() -> None:
    desk = Desk()
    desk.error = PlanError("no such table")
    channel = MemoryChannel(desk)
    with pytest.raises(PlanError) as caught:
        channel.call(Heartbeat(1))
    assert caught.value is desk.error
    desk.error = None
    assert channel.call(Heartbeat(2)).message == Done()


def test_the_end_is_told_once() -> None:
    desk = Desk()
    channel = MemoryChannel(desk)
    channel.call(Leave())
    channel.close()
    channel.close()
    assert desk.ends == [None]


def test_one_request_at_a_time() -> None:
    channel = MemoryChannel(Desk())
    channel.send(PULL)
    with pytest.raises(AssertionError, match="one request in flight"):
        channel.send(PULL)
    channel.receive()
    with pytest.raises(AssertionError, match="nothing was sent"):
        channel.receive()
