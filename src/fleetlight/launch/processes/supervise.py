# SPDX-License-Identifier: Apache-2.0
"""The loop that looks, asks `Watch`, and acts, until a gang is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.processes.watch import Elsewhere, Seen, Watch
from fleetlight.roles.role import Kind

#: how often to look; output reaches the terminal and an end is noticed within this time
TICK_S = 0.03

#: called with whether all workers here are done; how it goes on the other machines
Ask = Callable[[bool], Elsewhere]


def supervise(gang: Gang, ask: Ask, interrupts: Interrupts, revivals: int = 0) -> Watch:
    """Watch over a started gang until nothing of it runs any more."""
    watch = Watch(gang.members, gang.run.job.grace_s, revivals)
    try:
        while not watch.is_over:
            gang.pump()
            seen = _look(gang, ask, interrupts)
            if (lost := watch.to_revive(seen)) is not None:
                gang.revive(lost, watch.revivals_left)
                continue
            number = watch.step(seen)
            if number is not None:
                gang.signal(number)
            elif not watch.is_over:
                time.sleep(TICK_S)
    finally:
        gang.close()
    return watch


def _look(gang: Gang, ask: Ask, interrupts: Interrupts) -> Seen:
    exits = gang.exits()
    ended = sum(1 for one in exits if one.member.kind is Kind.WORKER and one.status == 0)
    workers = sum(1 for member in gang.members if member.kind is Kind.WORKER)
    return Seen(
        now=time.monotonic(),
        exits=exits,
        leaving=any(one.status for one in exits) and gang.somebody_leaves(),
        interrupts=list(interrupts.seen),
        elsewhere=ask(ended == workers),
    )
