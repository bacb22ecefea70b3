# SPDX-License-Identifier: Apache-2.0
"""`Snapshot` and `Event`: the lines of files in the folder `metrics` of a log folder. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import msgspec

T = TypeVar("T")

#: the folder in a log folder
FOLDER = "metrics"
#: the events of processes and launchers
EVENTS_PREFIX = "events."
SUFFIX = ".jsonl"


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metrics of one process at one moment."""

    #: seconds since 1970
    at: float
    #: which start of the process this is: the number after a restart is another
    pid: int
    #: by name, or `name{label}`
    values: dict[str, float]
    #: by name: how often each number occurred
    counts: dict[str, dict[int, int]] = {}


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened to a process or a job."""

    at: float
    #: `worker 1`, or `fleetrun`
    who: str
    #: one word: `start`, `exit`, `restart`, `checkpoint`, `resume`, `publication`, `join`, `end`
    kind: str
    text: str
    #: the address of its machine in the job
    host: str = ""
    pid: int | None = None
    #: how it ended: the exit code, or -N for signal N
    status: int | None = None
    #: the number of this restart
    restart: int = 0
    step: int | None = None


def labelled(name: str, label: str) -> str:
    """The key of one of several values of a metric."""
    return f"{name}{{{label}}}"


def split_key(key: str) -> tuple[str, str]:
    """The name of a metric and its label, "" if there is none."""
    name, _, rest = key.partition("{")
    return name, rest.removesuffix("}")


def snapshot_file(kind: str, index: int) -> str:
    """The name of the file of one process."""
    return f"{kind}.{index}{SUFFIX}"


def line_of(snapshot: Snapshot) -> bytes:
    """A snapshot as a line of a file."""
    odd = {key: str(value) for key, value in snapshot.values.items() if not math.isfinite(value)}
    if not odd:
        return msgspec.json.encode(snapshot)
    # JSON has no NaN and no infinity; the reader takes them as text
    return msgspec.json.encode(
        {**msgspec.structs.asdict(snapshot), "values": {**snapshot.values, **odd}}
    )


def snapshots_in(data: bytes) -> Iterator[Snapshot]:
    """The snapshots of whole lines; damaged lines are left out."""
    yield from _decoded(data, _SNAPSHOTS)


def events_in(data: bytes) -> Iterator[Event]:
    """The events of whole lines; damaged lines are left out."""
    yield from _decoded(data, _EVENTS)


def _decoded(data: bytes, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    for line in data.split(b"\n"):
        if line:
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError:
                continue


_SNAPSHOTS = msgspec.json.Decoder(Snapshot, strict=False)
_EVENTS = msgspec.json.Decoder(Event)
