# SPDX-License-Identifier: Apache-2.0
"""How far the clocks of hosts differ, so that a trace has one time axis.

A worker asks each server for its time. The server's clock was read between the request and the
reply, so half of their distance is the largest error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

K = TypeVar("K")

#: the fastest of these replies counts
_TIMES = 5

#: two readings of a clock may show the same time until this much later
_RESOLUTION_US = 1e6 * time.get_clock_info("time").resolution


class ClockLead(msgspec.Struct, frozen=True):
    """How far one clock is ahead of another, in microseconds."""

    ahead_us: float
    #: the largest error
    error_us: float


class TimedPart(Protocol):
    """What is known of the clock of a process."""

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def clocks(self) -> Mapping[str, ClockLead]:
        """By name of a server: how far its clock is ahead of that of this process."""


def leads_of(ask: Callable[[], Mapping[str, int]]) -> dict[str, ClockLead]:
    """How far the clocks of others are ahead; `ask` returns the nanoseconds that each shows.

    Integers, since a float of seconds since 1970 has a resolution of .24 microseconds.
    """
    found: dict[str, ClockLead] = {}
    for _ in range(_TIMES):
        # in this order: the request is not sent before `now`, and takes no longer than measured
        began = time.perf_counter_ns()
        now = time.time_ns()
        shown = ask()
        half_us = (time.perf_counter_ns() - began) / 2e3
        for name, shown_ns in shown.items():
            lead = ClockLead((shown_ns - now) / 1e3 - half_us, half_us + _RESOLUTION_US)
            if name not in found or lead.error_us < found[name].error_us:
                found[name] = lead
    return found


def leads_over_first(parts: Sequence[TimedPart]) -> dict[str, ClockLead]:
    """By host: how far its clock is ahead of that of the first part; none where nothing says it.

    Workers on two hosts are compared by a server that both have asked.
    """
    hosts = {part.name: part.host for part in parts}
    edges: dict[tuple[str, str], ClockLead] = {}
    for part in parts:
        for server, lead in part.clocks.items():
            if server in hosts and hosts[server] != part.host:
                back = ClockLead(-lead.ahead_us, lead.error_us)
                _keep_better(edges, (part.host, hosts[server]), lead)
                _keep_better(edges, (hosts[server], part.host), back)
    best = {parts[0].host: ClockLead(0.0, 0.0)} if parts else {}
    is_better = True
    while is_better:
        is_better = False
        for (here, there), lead in edges.items():
            if here in best:
                known = best[here]
                error = known.error_us + lead.error_us
                over_here = ClockLead(known.ahead_us + lead.ahead_us, error)
                is_better |= _keep_better(best, there, over_here)
    return best


def _keep_better(known: dict[K, ClockLead], key: K, lead: ClockLead) -> bool:
    """Keep the lead with the smaller error; True if that is the new one."""
    if key in known and known[key].error_us <= lead.error_us:
        return False
    known[key] = lead
    return True
