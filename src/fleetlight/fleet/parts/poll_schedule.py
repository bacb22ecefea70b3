# SPDX-License-Identifier: Apache-2.0
"""`PollSchedule`: at which of their common places workers ask each other what is called for. Pure.

All workers pass the same places in the same order, so to count them is to agree on them: nothing is
sent between two meetings, and there are about two in a second, however fast the steps are.
"""

from __future__ import annotations

#: how long a call may wait for the next meeting, as far as steps take as long as they took
EVERY_S = 0.5
#: more places than these never lie between two meetings: steps may become slower
MOST = 100


class PollSchedule:
    """Counts the places of one worker."""

    def __init__(self) -> None:
        self._place = 0
        self._last = 0
        self._next = 1

    def arrives(self) -> bool:
        """The worker has come to the next place; answers whether all meet there."""
        self._place += 1
        return self._place == self._next

    def met(self, seconds: float) -> None:
        """They have met; `seconds` have passed since the last time, the same on all of them."""
        passed = self._place - self._last
        fitting = passed * EVERY_S / max(seconds, 1e-9)
        self._last = self._place
        # a first step is slow, a lucky one fast: to trust either would be to jump
        self._next = self._place + max(1, int(min(fitting, 2 * passed, MOST)))
