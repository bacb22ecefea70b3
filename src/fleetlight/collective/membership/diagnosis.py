# SPDX-License-Identifier: Apache-2.0
"""Which worker caused a failed wait, by the heartbeats of all. Pure: no store, no clock."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from fleetlight.roles.members import MemberHello


class PeerConnectionError(RuntimeError):
    """A connection to another worker failed or timed out; `diagnose` names the cause."""


class WorkerHeartbeat(msgspec.Struct, frozen=True):
    """What a worker writes to the store at intervals, to show that it is alive."""

    count: int
    step: int
    #: seconds since the workers met, by the sender's monotonic clock
    time: float
    #: the operation in which the worker waits for others, if it waits
    waiting: str | None = None

    def place(self) -> str:
        """The step and operation of the worker, for error texts."""
        return f"at step {self.step}" + (f" in {self.waiting}" if self.waiting else "")


class Departure(msgspec.Struct, frozen=True):
    """What a worker writes last: it has finished, or failed with an error."""

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
    """Sentences about the other workers, worst first: failed, silent, left, at an earlier step."""
    failed, silent, left, earlier = [], [], [], []
    for index, hello in sorted(hellos.items()):
        who = name_of(index, hello)
        gone = departures.get(index)
        heartbeat = after.get(index)
        if gone is not None and gone.error is not None:
            failed.append((gone.time, f"{who} failed after step {gone.step}: {gone.error}"))
        elif gone is not None:
            left.append(f"{who} left after step {gone.step}, this one is at step {me.step}")
        elif heartbeat is None or is_silent(before.get(index), heartbeat):
            silent.append(f"{who} {health_of(before.get(index), heartbeat, now)}")
        elif heartbeat.step < me.step:
            place = heartbeat.place().removeprefix("at ")
            earlier.append(f"{who} is alive but still at {place}, not {me.step}")
    return [text for _, text in sorted(failed)] + silent + left + earlier


def health_of(before: WorkerHeartbeat | None, after: WorkerHeartbeat | None, now: float) -> str:
    """The state of a worker that has not departed, from two readings of its heartbeat."""
    if after is None:
        return "sent no heartbeat"
    if is_silent(before, after):
        silence = max(0.0, now - after.time)
        return f"has been silent for {silence:.0f} s, last seen at step {after.step}"
    return f"is alive, {after.place()}"


def is_silent(before: WorkerHeartbeat | None, after: WorkerHeartbeat) -> bool:
    """True when no heartbeat came between two readings."""
    return before is not None and before.count == after.count


def describe_waits(
    operation: str, after: Mapping[int, WorkerHeartbeat], hellos: Mapping[int, MemberHello]
) -> str:
    """The sentence where all workers are alive at the same step: where each of them waits."""
    elsewhere = [
        f"{name_of(index, hellos[index])} is alive, {heartbeat.place()}"
        for index, heartbeat in sorted(after.items())
        if heartbeat.waiting != operation
    ]
    if not elsewhere:
        return "no worker is silent or behind, all wait in it: the network lost data"
    return (
        f"this worker waits in {operation}, but {'; '.join(elsewhere)}; every worker must make "
        f"the same calls in the same order"
    )


def name_of(index: int, hello: MemberHello) -> str:
    """The name of a worker in error texts."""
    return f"worker {index} ({hello.where()})"


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error of torch, without source lines and guesses at the cause."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    text = re.sub(r"Got the following error when running the callback: \w+: |\[/\S+\] ", "", text)
    return re.split(r"\.\s", text, maxsplit=1)[0][:160]
