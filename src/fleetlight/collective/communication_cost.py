# SPDX-License-Identifier: Apache-2.0
"""What communication costs a worker, counted from the end of its first step."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fleetlight.observe.telemetry.step_times import WAIT, step_times
from fleetlight.roles.address import choose_interface, is_loopback
from fleetlight.roles.members import MemberHello

#: the counters of this process's network namespace, which /sys may not show
_COUNTERS = Path("/proc/self/net/dev")
#: the index, after an interface's name, of the bytes it has sent
_SENT = 8
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationCost:
    """The cost of the steps since the first one."""

    steps: int = 0
    #: from the end of the first step to the end of the last
    seconds: float = 0.0
    #: the part of these seconds in which this worker waited for the others
    waited_s: float = 0.0
    #: bytes that left this host through the interface, from any process; None on one host
    sent_bytes: int | None = None
    interface: str | None = None

    def sentence(self, waits: bool = True) -> str:
        """A sentence for the log, per step on average; empty before the second step."""
        if self.steps == 0:
            return ""
        parts = []
        if self.sent_bytes is not None:
            sent = self.sent_bytes / self.steps / MIB
            parts.append(f"{sent:.3g} MiB a step left this host ({self.interface})")
        if waits:
            waited = _part(self.waited_s / self.steps, self.seconds / self.steps)
            parts.append(f"waiting for the other workers took {waited} a step")
        return f"communication: {', '.join(parts)}" if parts else ""


@dataclasses.dataclass(frozen=True)
class _Counters:
    """The values of all counters at one moment."""

    steps: int
    at: float
    waited_s: float
    sent_bytes: int | None


class CommunicationMeter:
    """Counts steps, waits, and the bytes that an interface sends."""

    def __init__(
        self,
        interface: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        counters: Path = _COUNTERS,
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._interface = interface if interface and self._sent(interface) is not None else None
        self._lock = threading.Lock()
        #: the threads that wait now, the moment the first began, and the sum of all waits
        self._waiting = 0
        self._since = 0.0
        self._waited_s = 0.0
        self._first: _Counters | None = None
        self._last: _Counters | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting; nested blocks and threads count once."""
        with self._lock:
            if self._waiting == 0:
                self._since = self._clock()
            self._waiting += 1
        before = step_times.enter(WAIT)
        try:
            yield
        finally:
            step_times.leave(before)
            with self._lock:
                self._waiting -= 1
                if self._waiting == 0:
                    self._waited_s += self._clock() - self._since

    def count_step(self) -> None:
        """Count a step. The cost excludes the first one, which allocates buffers and plans."""
        steps = self._last.steps + 1 if self._last else 1
        self._last = _Counters(steps, self._clock(), self._waited_s, self._sent(self._interface))
        self._first = self._first or self._last

    def cost(self) -> CommunicationCost:
        """The cost of the steps after the first one so far."""
        first, last = self._first, self._last
        if first is None or last is None:
            return CommunicationCost(interface=self._interface)
        return CommunicationCost(
            steps=last.steps - first.steps,
            seconds=last.at - first.at,
            waited_s=last.waited_s - first.waited_s,
            sent_bytes=_between(first.sent_bytes, last.sent_bytes),
            interface=self._interface,
        )

    def _sent(self, interface: str | None) -> int | None:
        """The bytes that an interface has sent; None where they are not known."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in self._counters.read_text().splitlines() if interface else ():
                name, _, numbers = line.partition(":")
                if name.strip() == interface:
                    return int(numbers.split()[_SENT])
        return None


def meter_of(hellos: Mapping[int, MemberHello], index: int) -> CommunicationMeter:
    """The meter of a worker; it reads an interface where workers are on several hosts."""
    addresses = {hello.address for hello in hellos.values()}
    if len(addresses) < 2 or any(map(is_loopback, addresses)):
        return CommunicationMeter()
    return CommunicationMeter(choose_interface(hellos[index].address))


def _between(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _part(some: float, whole: float) -> str:
    """`0.81 of 1.20 s`, `3.1 of 9.0 ms`."""
    if whole >= 1:
        return f"{some:.2f} of {whole:.2f} s"
    return f"{1000 * some:.1f} of {1000 * whole:.1f} ms"
