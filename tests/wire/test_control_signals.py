# SPDX-License-Identifier: Apache-2.0
"""Control signals are combined in any order."""

import itertools

from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal, combined

CALLS = [
    NO_SIGNAL,
    ControlSignal(stop=True),
    ControlSignal(saves=2),
    ControlSignal(True, 1),
    ControlSignal(saves=5),
]


def test_control_signals_are_combined() -> None:
    assert ControlSignal(stop=True) | ControlSignal(saves=3) == ControlSignal(True, 3)
    assert combined([]) == NO_SIGNAL
    for one, other in itertools.product(CALLS, CALLS):
        assert one | other == other | one
        assert one | other | one == one | other
    assert combined(CALLS) == ControlSignal(True, 5)
