# SPDX-License-Identifier: Apache-2.0
"""`ReplayLog`: what a worker was told in answer to calls that are made once in the life of a job.

A later life of the worker runs the same script from its beginning, and makes the same calls again;
it is answered what the life before was answered. Pure, but for the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fleetlight.errors import ComebackError

#: writes a call down
Sink = Callable[["LoggedReply", Sequence[bytes]], None]


class LoggedReply(msgspec.Struct, frozen=True, tag="Answered"):
    """A call that was answered. Arrays: the parts of the answer."""

    number: int
    name: str
    #: how many meetings of all workers there had been behind it
    meetings: int


def may_be_made_again(number: int, prelude: int, since: int) -> bool:
    """Whether a later life may come to a call: before the first batch, or since the last step."""
    return number < prelude or number >= since


class ReplayLog:
    """Counts calls and meetings. Without a sink nothing is kept, since nobody comes back."""

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._known: dict[int, tuple[LoggedReply, Sequence[bytes]]] = {}
        #: calls made, and meetings among them
        self.made = 0
        self.meetings = 0

    def remember(self, one: LoggedReply, answer: Sequence[bytes]) -> None:
        """A life before has made this call; those that came later in that one are forgotten."""
        for number in [n for n in self._known if n >= one.number]:
            del self._known[number]
        self._known[one.number] = one, answer

    def forget(self) -> None:
        """No life before has made any call."""
        self._known.clear()

    @property
    def is_known(self) -> bool:
        """True when the coming call was answered in a life before."""
        return self.made in self._known

    def once(self, name: str, act: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """The answer to a call: that of a life before, or that of `act`."""
        known = self._known.pop(self.made, None)
        if known is not None:
            one, answer = known
            self._check(one, name)
            self.meetings = one.meetings
        else:
            number = self.made
            answer = act()
            # calls that it was made of are a part of it
            self.made = number
            self._write(LoggedReply(number, name, self.meetings), answer)
        self.made += 1
        return answer

    def go_on(self, made: int, meetings: int) -> None:
        """The script has come to where the life before was when it had made so many calls."""
        self.made, self.meetings = made, meetings

    def _write(self, one: LoggedReply, answer: Sequence[bytes]) -> None:
        if self._sink is not None:
            self._sink(one, answer)

    def _check(self, one: LoggedReply, name: str) -> None:
        if one.name != name:
            raise ComebackError(
                f"this worker was started again, and its script came to {name!r} where it had "
                f"called {one.name!r} before; the calls of a script must not depend on anything "
                "that changes from one start to the next"
            )
