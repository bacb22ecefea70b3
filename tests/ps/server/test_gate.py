# SPDX-License-Identifier: Apache-2.0
"""Gate: many pass, one is alone."""

from __future__ import annotations

import threading

import pytest

from fleetlight.errors import DeadlineError
from fleetlight.ps.server.gate import Gate


def test_many_pass_at_a_time() -> None:
    gate = Gate(5)
    with gate.passing(), gate.passing():
        pass
    with gate.alone():
        pass
    with gate.passing():
        pass


def test_nobody_is_alone_while_somebody_passes() -> None:
    gate = Gate(0.02)
    with gate.passing(), pytest.raises(DeadlineError, match=r"0\.02 s for the pushes under way"):
        gate.alone().__enter__()
    # who gave up holds nobody up
    with gate.passing():
        pass


def test_nobody_passes_while_one_is_alone() -> None:
    gate = Gate(0.02)
    with gate.alone():
        with pytest.raises(DeadlineError, match="a push waited"):
            gate.passing().__enter__()
        with pytest.raises(DeadlineError, match="for another one"):
            gate.alone().__enter__()


def test_being_alone_is_waited_for_and_ends() -> None:
    gate, inside, seen = Gate(20), threading.Event(), []

    def passer() -> None:
        with gate.passing():
            inside.set()
            seen.append("passed")

    with gate.alone():
        thread = threading.Thread(target=passer)
        thread.start()
        assert not inside.is_set()
        seen.append("alone")
    thread.join(20)
    assert seen == ["alone", "passed"]
