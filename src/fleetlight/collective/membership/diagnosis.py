# SPDX-License-Identifier: Apache-2.0
"""What signs of life say about the workers when a wait fails. Pure: no store, no clock."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from fleetlight.collective.membership.members import MemberHello

#: the way out when a wait has expired although all is well
LONGER = (
    "if they need longer, raise the deadline: DistributedStrategy(deadline_s=...) given to "
    "fleet.init, or FLEET_DEADLINE_S"
)


class PeerConnectionError(RuntimeError):
    """A connection to another worker failed or timed out; `diagnose` names the cause."""


class WorkerHeartbeat(msgspec.Struct, frozen=True):
    """One sign of life."""

    count: int
    step: int
    #: seconds since the workers met, by the sender's monotonic clock
    time: float
    #: the operation in which the worker waits for others, if it waits
    waiting: str | None = None

    def place(self) -> str:
        """Where the worker is, for error texts."""
        return f"at step {self.step}" + (f" in {self.waiting}" if self.waiting else "")


class Departure(msgspec.Struct, frozen=True):
    """What a worker leaves behind when it goes: finished, or failed with an error."""

    step: int
    #: as in `WorkerHeartbeat`
    time: float
    error: str | None = None


def diagnose(
    me: WorkerHeartbeat,
    before: Mapping[int, WorkerHeartbeat],
    after: Mapping[int, WorkerHeartbeat],
    departures: Mapping[int, Departure],
    hellos: Mapping[int, MemberHello],
    now: float,
) -> list[str]:
    """What is wrong with the others, worst first: failed, silent, left, behind."""
    failed, silent, left, behind = [], [], [], []
    for index, hello in sorted(hellos.items()):
        who = name_of(index, hello)
        gone = departures.get(index)
        beat = after.get(index)
        if gone is not None and gone.error is not None:
            failed.append((gone.time, f"{who} failed after step {gone.step}: {gone.error}"))
        elif gone is not None:
            left.append(f"{who} left after step {gone.step}, this one is at step {me.step}")
        elif beat is None or is_silent(before.get(index), beat):
            silent.append(f"{who} {told(before.get(index), beat, now)}")
        elif beat.step < me.step:
            place = beat.place().removeprefix("at ")
            behind.append(f"{who} is alive but still at {place}, not {me.step}")
    return [text for _, text in sorted(failed)] + silent + left + behind


def told(before: WorkerHeartbeat | None, after: WorkerHeartbeat | None, now: float) -> str:
    """How a worker that has not departed is, from two readings of its beat."""
    if after is None:
        return "never gave a sign of life"
    if is_silent(before, after):
        silence = max(0.0, now - after.time)
        return f"has been silent for {silence:.0f} s, last seen at step {after.step}"
    return f"is alive, {after.place()}"


def is_silent(before: WorkerHeartbeat | None, after: WorkerHeartbeat) -> bool:
    """True when no beat came between two readings."""
    return before is not None and before.count == after.count


def apart(
    operation: str, after: Mapping[int, WorkerHeartbeat], hellos: Mapping[int, MemberHello]
) -> str:
    """What to say when all are alive and none is behind: where everybody waits."""
    elsewhere = [
        f"{name_of(index, hellos[index])} is alive, {beat.place()}"
        for index, beat in sorted(after.items())
        if beat.waiting != operation
    ]
    if not elsewhere:
        return "no worker is silent or behind, all wait in it: the network lost data"
    return (
        f"this worker waits in {operation}, but {'; '.join(elsewhere)}; every worker must make "
        f"the same calls in the same order"
    )


def name_of(index: int, hello: MemberHello) -> str:
    """A worker, for error texts."""
    return f"worker {index} ({hello.where()})"


def first_sentence(error: BaseException) -> str:
    """What torch said first, without places in its sources, futures, and guesses at the cause."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = re.sub(r"Got the following error when running the callback: \w+: |\[/\S+\] ", "", text)
    return re.split(r"\.\s", text, maxsplit=1)[0][:160]
