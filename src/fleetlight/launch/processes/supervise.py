# SPDX-License-Identifier: Apache-2.0
"""The loop that observes a gang, asks `Watch` what to do, and does it."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.processes.watch import (
    Observation,
    Phase,
    RemoteState,
    Verdict,
    Watch,
)
from fleetlight.roles.role import Kind

#: the interval of the loop, which bounds the delay of output and of noticing an exit
TICK_S = 0.03

#: takes whether all workers of this machine are done; returns the state of the other machines
ExchangeState = Callable[[bool], RemoteState]


def supervise(
    gang: Gang, exchange_state: ExchangeState, interrupts: Interrupts, max_restarts: int = 0
) -> Watch:
    """Supervise a started gang until none of its processes runs."""
    job = gang.run.job
    watch = Watch(gang.members, job.grace_s, max_restarts, job.stop_s)
    try:
        while not watch.is_over:
            gang.pump()
            seen = _observe(gang, exchange_state, interrupts, watch)
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
        gang.close(has_failed=watch.verdict is not Verdict.SUCCESS)
    return watch


def _observe(
    gang: Gang, exchange_state: ExchangeState, interrupts: Interrupts, watch: Watch
) -> Observation:
    now = time.monotonic()
    exits = watch.confirmed_exits(gang.exits(), now)
    done = sum(1 for exit_ in exits if exit_.member.kind is Kind.WORKER and not exit_.has_failed)
    workers = sum(1 for member in gang.members if member.kind is Kind.WORKER)
    return Observation(
        now=now,
        exits=exits,
        leaving=any(exit_.has_failed for exit_ in exits) and gang.any_exiting(),
        interrupts=list(interrupts.seen),
        can_stop=bool(interrupts.seen or watch.phase is Phase.ENDING) and gang.can_stop(),
        remote=exchange_state(done == workers),
    )
