# SPDX-License-Identifier: Apache-2.0
"""The end of the store: whoever serves it leaves last."""

from __future__ import annotations

import time
from collections.abc import Collection

from fleetlight.launch.machines.heartbeats import Heartbeats
from fleetlight.launch.processes.interrupts import Interrupts

#: how long launchers are waited for that are in no start of the job and cannot know of its end
STRANGERS_S = 5.0
_LOOK_S = 0.05


def see_off(
    heartbeats: Heartbeats, crew: Collection[int], longest_s: float, interrupts: Interrupts
) -> None:
    """Serve until every launcher has said goodbye or fallen silent.

    The `crew` are the launchers of the job's last start: each of them is about to say goodbye, so
    there is time for it. A further interrupt ends the wait.
    """
    began, interrupts_before = time.monotonic(), len(interrupts.seen)
    # One may have come since the last beat: the whole job may be shorter than that.
    heartbeats.listen(began)
    while len(interrupts.seen) == interrupts_before:
        now = time.monotonic()
        heartbeats.beat(now)
        staying = heartbeats.staying(now)
        waited_for = {
            number
            for number in staying
            if not heartbeats.is_late(
                number, began, now, longest_s if number in crew else STRANGERS_S
            )
        }
        if not waited_for:
            return
        time.sleep(_LOOK_S)
