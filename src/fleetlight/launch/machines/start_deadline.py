# SPDX-License-Identifier: Apache-2.0
"""Wait for other machines up to a deadline, with progress messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fleetlight.errors import MembershipError
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.screen import Screen
from fleetlight.roles.role import endpoint_text

#: the interval of messages about missing machines
TELL_S = 3.0
_LOOK_S = 0.05


class StartDeadline:
    """Waits for conditions, prints what is missing, and fails at the deadline."""

    def __init__(self, screen: Screen, interrupts: Interrupts, deadline_s: float) -> None:
        self._screen, self._interrupts = screen, interrupts
        self._began = time.monotonic()
        self._deadline_s = deadline_s
        self._reported_at = self._began

    @property
    def left_s(self) -> float:
        """The time until the deadline."""
        return max(0.0, self._began + self._deadline_s - time.monotonic())

    def wait(self, is_there: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Return when `is_there()`; raise MembershipError with `missing()` at the deadline."""
        while not is_there():
            self._interrupts.check()
            now = time.monotonic()
            if now - self._began > self._deadline_s:
                raise MembershipError(
                    f"the job did not form within {self._deadline_s:g} s (--deadline_s): "
                    f"{missing()}; start the same command there, or check addresses and firewalls"
                )
            if now - self._reported_at >= TELL_S:
                self._reported_at = now
                self._screen.say(missing())
            time.sleep(_LOOK_S)


def describe_missing(spec: RendezvousSpec, here: Sequence[str]) -> str:
    """A sentence about the machines that have not joined yet."""
    least, most = spec.min_nodes, spec.max_nodes
    missing = [host for host in spec.hosts if host not in here]
    names = ", ".join(sorted(here))
    if missing:
        port = spec.master[1]
        return f"not ready endpoints: {[endpoint_text((host, port)) for host in missing]}"
    if len(here) >= most:
        return f"all machines are connected ({names}), but not all are ready to start"
    if len(here) >= least:
        return f"enough machines are connected ({names}); up to {most} may join"
    return f"waiting for {least - len(here)} of {least} machines (connected: {names})"
