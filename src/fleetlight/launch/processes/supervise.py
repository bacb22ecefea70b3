# SPDX-License-Identifier: Apache-2.0
"""The loop that looks, asks `Watch`, and acts, until a gang is over."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.processes.watch import Observation, Phase, RemoteState, Watch
from fleetlight.roles.role import Kind

#: how often to look; output reaches the terminal and an end is noticed within this time
TICK_S = 0.03

#: called with whether all workers here are done; how it goes on the other machines
Ask = Callable[[bool], RemoteState]


def supervise(gang: Gang, ask: Ask, interrupts: Interrupts, max_restarts: int = 0) -> Watch:
    """Watch over a started gang until nothing of it runs any more."""
    job = gang.run.job
    watch = Watch(gang.members, job.grace_s, max_restarts, job.stop_s)
    try:
        while not watch.is_over:
            gang.pump()
            seen = _look(gang, ask, interrupts, watch)
            if (lost := watch.to_restart(seen)) is not None:
                gang.restart_alone(lost, watch.restarts_left)
                continue
            if (lost := watch.to_continue_without(seen)) is not None:
                gang.continue_without(lost)
            number = watch.step(seen)
            if number is not None and watch.asked:
                gang.ask(number, watch.asked)
            elif number is not None:
                gang.signal(number)
            elif not watch.is_over:
                time.sleep(TICK_S)
    finally:
        gang.close()
    return watch


def _look(gang: Gang, ask: Ask, interrupts: Interrupts, watch: Watch) -> Observation:
    now = time.monotonic()
    exits = watch.confirmed_exits(gang.exits(), now)
    ended = sum(1 for one in exits if one.member.kind is Kind.WORKER and not one.has_failed)
    workers = sum(1 for member in gang.members if member.kind is Kind.WORKER)
    return Observation(
        now=now,
        exits=exits,
        leaving=any(one.has_failed for one in exits) and gang.any_exiting(),
        interrupts=list(interrupts.seen),
        can_stop=bool(interrupts.seen or watch.phase is Phase.ENDING) and gang.can_stop(),
        elsewhere=ask(ended == workers),
    )
