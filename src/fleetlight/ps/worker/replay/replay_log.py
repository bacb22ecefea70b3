# SPDX-License-Identifier: Apache-2.0
"""`ReplayLog`: the results of calls that run once in a job, such as barriers.

A restarted worker runs the script from its beginning and repeats these calls; the log returns the
results of the previous incarnation. Pure, except for the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fleetlight.errors import ComebackError

#: writes a result to disk
Sink = Callable[["LoggedReply", Sequence[bytes]], None]


class LoggedReply(msgspec.Struct, frozen=True, tag=True):
    """A completed call. Arrays: the parts of its result."""

    number: int
    name: str
    #: number of barriers after it
    meetings: int


def may_be_made_again(number: int, prelude: int, since: int) -> bool:
    """True for a call that a restart may repeat: before the first batch or since the last step."""
    return number < prelude or number >= since


class ReplayLog:
    """Counts calls and barriers. Without a sink it stores no results."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._known: dict[int, tuple[LoggedReply, Sequence[bytes]]] = {}
        #: number of calls, and of barriers among them
        self.made = 0
        self.meetings = 0

    def remember(self, one: LoggedReply, reply: Sequence[bytes]) -> None:
        """Add a result of an earlier incarnation; drop results of later calls."""
        for number in [n for n in self._known if n >= one.number]:
            del self._known[number]
        self._known[one.number] = one, reply

    def forget(self) -> None:
        """Drop all results of earlier incarnations."""
        self._known.clear()

    @property
    def is_known(self) -> bool:
        """True when an earlier incarnation completed the next call."""
        return self.made in self._known

    def once(self, name: str, act: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """Return the logged result of a call, or run `act` and log its result."""
        known = self._known.pop(self.made, None)
        if known is not None:
            one, reply = known
            self._check(one, name)
            self.meetings = one.meetings
        else:
            number = self.made
            reply = act()
            # nested calls are part of this call
            self.made = number
            self._write(LoggedReply(number, name, self.meetings), reply)
        self.made += 1
        return reply

    def go_on(self, made: int, meetings: int) -> None:
        """Continue from the position of the previous incarnation."""
        self.made, self.meetings = made, meetings

    def _write(self, one: LoggedReply, reply: Sequence[bytes]) -> None:
        if self._sink is not None:
            self._sink(one, reply)

    def _check(self, one: LoggedReply, name: str) -> None:
        if one.name != name:
            raise ComebackError(
                f"after a restart, the script of this worker called {name!r} where it called "
                f"{one.name!r} before; the calls of a script must not depend on anything that "
                "changes from one start to the next"
            )
