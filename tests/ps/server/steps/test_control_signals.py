# SPDX-License-Identifier: Apache-2.0
"""All workers of a step receive the same control signals, even if the server crashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import OPTIONS, plan

from fleetlight.ps import messages as m
from fleetlight.wire.control_signals import ControlSignal


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("crash_after", [None, "snapshot"])
def test_a_repeated_push_returns_the_signal_of_its_step(
    tmp_path: Path, clips: bool, crash_after: str | None
) -> None:
    """The other worker has acted on the signal and waits for this worker."""
    cluster = RestartableCluster(tmp_path / "kept", plan("sync"))
    cluster.workers[0].say(m.Heartbeat(0, ControlSignal(saves=1)))
    gradients: dict[int, Any] = {0: ([1], [2])}
    last: list[Any] = [w.push_request(0, {0: None}, None, hold=clips) for w in cluster.workers]
    replies = cluster.send(last, gradients)
    if clips:
        gradients, last = {}, [m.Apply(1, 0, 0, 0, 0, 0.5, OPTIONS)] * 2
        replies = cluster.send(last, gradients)
    assert [reply.call for reply, _ in replies] == [ControlSignal(saves=1)] * 2
    # a later signal, which no worker has received
    cluster.workers[0].say(m.Heartbeat(1, ControlSignal(stop=True)))
    if crash_after is not None:
        assert cluster.durability.snapshot()
    cluster.restart()
    reply, _ = cluster.workers[1].send(last[1], gradients, None)
    assert (reply.applied, reply.call) == (True, ControlSignal(saves=1))
    cluster.close()
