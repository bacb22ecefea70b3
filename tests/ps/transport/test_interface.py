# SPDX-License-Identifier: Apache-2.0
"""MemoryChannel: behaves like a channel over a socket, within one process."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ps.transport.doubles import PULL, RecordingHandler

from fleetlight.errors import PlanError
from fleetlight.ps.messages import Done, Heartbeat, Leave, Pulled
from fleetlight.ps.transport import Channel, MemoryChannel


def test_arrays_are_passed_by_reference() -> None:
    channel: Channel = MemoryChannel(RecordingHandler())
    sent = np.arange(3)
    reply = channel.call(PULL, [sent])
    assert reply.message == Pulled(1, 1)
    assert reply.arrays[0] is sent


def test_errors_are_raised_unchanged() -> None:
    handler = RecordingHandler()
    handler.error = PlanError("no such table")
    channel = MemoryChannel(handler)
    with pytest.raises(PlanError) as caught:
        channel.call(Heartbeat(1))
    assert caught.value is handler.error
    handler.error = None
    assert channel.call(Heartbeat(2)).message == Done()


def test_the_handler_sees_one_end() -> None:
    handler = RecordingHandler()
    channel = MemoryChannel(handler)
    channel.call(Leave())
    channel.close()
    channel.close()
    assert handler.ends == [None]


def test_a_channel_has_one_request_in_flight() -> None:
    channel = MemoryChannel(RecordingHandler())
    channel.send(PULL)
    with pytest.raises(AssertionError, match="one request in flight"):
        channel.send(PULL)
    channel.receive()
    with pytest.raises(AssertionError, match="nothing was sent"):
        channel.receive()
