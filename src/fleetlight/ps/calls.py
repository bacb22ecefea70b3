# SPDX-License-Identifier: Apache-2.0
"""`Call`: what somebody asks all workers of a job to do behind a step. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Call(msgspec.Struct, frozen=True):
    """Calls add up: nobody takes one back, and to hear one twice is to hear it once."""

    #: the job is to stop
    stop: bool = False
    #: how many times it was to save by itself
    saves: int = 0

    def __or__(self, other: Call) -> Call:
        return Call(self.stop or other.stop, max(self.saves, other.saves))


NONE = Call()


def added(calls: Iterable[Call]) -> Call:
    """What several have called for."""
    everything = NONE
    for call in calls:
        everything |= call
    return everything
