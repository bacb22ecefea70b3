# SPDX-License-Identifier: Apache-2.0
"""What is called for adds up, in any order."""

from __future__ import annotations

import itertools

from fleetlight.ps.calls import NONE, Call, added

CALLS = [NONE, Call(stop=True), Call(saves=2), Call(True, 1), Call(saves=5)]


def test_calls_add_up() -> None:
    assert Call(stop=True) | Call(saves=3) == Call(True, 3)
    assert added([]) == NONE
    for one, other in itertools.product(CALLS, CALLS):
        assert one | other == other | one
        assert one | other | one == one | other
    assert added(CALLS) == Call(True, 5)
