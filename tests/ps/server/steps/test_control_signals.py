# SPDX-License-Identifier: Apache-2.0
"""What is called for behind a step is heard by all who made it, whoever dies over the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ps.server.durability.test_durability import Lives
from tests.ps.serving import OPTIONS, plan

from fleetlight.ps import messages as m
from fleetlight.wire.control_signals import ControlSignal


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("between", [None, "snapshot"])
def test_who_asks_again_hears_what_was_called_for_behind_the_step(
    tmp_path: Path, clips: bool, between: str | None
) -> None:
    """The other worker has acted upon it, and waits there."""
    one = Lives(tmp_path / "kept", plan("sync"))
    one.workers[0].say(m.Heartbeat(0, ControlSignal(saves=1)))
    gradients: dict[int, Any] = {0: ([1], [2])}
    last: list[Any] = [w.pushed(0, {0: None}, None, hold=clips) for w in one.workers]
    answers = one.send(last, gradients)
    if clips:
        gradients, last = {}, [m.Apply(1, 0, 0, 0, 0, 0.5, OPTIONS)] * 2
        answers = one.send(last, gradients)
    assert [answer.call for answer, _ in answers] == [ControlSignal(saves=1)] * 2
    # called for later: nobody has heard it
    one.workers[0].say(m.Heartbeat(1, ControlSignal(stop=True)))
    if between is not None:
        assert one.durability.snapshot()
    one.die()
    answer, _ = one.workers[1].send(last[1], gradients, None)
    assert (answer.applied, answer.call) == (True, ControlSignal(saves=1))
    one.end()
