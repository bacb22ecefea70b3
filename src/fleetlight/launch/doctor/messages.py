# SPDX-License-Identifier: Apache-2.0
"""What doctors say to each other, and what is found in the end."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fleetlight.security.token import AuthRequest, Challenge, Proof


class ExamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a doctor was started with; the same on all machines."""

    #: the machines as they were written, and the addresses they stand for here
    names: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    port: int = 0
    #: workers of a machine; they and their store have the ports behind `port`
    workers: int = 1
    seconds: float = 1.0

    @property
    def ports(self) -> range:
        """Those that the processes of a job have on each machine."""
        return range(self.port + 1, self.port + self.workers + 2)


class Facts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One machine."""

    asked: ExamOptions = ExamOptions()
    #: its name, and what that stands for on this machine
    name: str = ""
    name_address: str | None = None
    fleetlight: str = ""
    torch: str = ""
    python: str = ""
    system: str = ""
    cores: int = 1
    gpus: int = 0
    #: bytes of memory, and of what processes can share
    memory: int = 0
    shared_memory: int | None = None
    #: how many files a process may open
    files: int | None = None
    #: OMP_NUM_THREADS
    threads: str | None = None
    interface: str | None = None
    mtu: int | None = None
    #: why a port of a job cannot be had
    taken: dict[int, str] = {}
    #: where something listens for as long as the doctor runs: those ports, and one that was free
    listening: tuple[int, ...] = ()


class Link(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From one machine to another, by their numbers."""

    sender: int
    receiver: int
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    #: why a port that is listened on cannot be reached
    closed: dict[int, str] = {}
    #: why it could not be measured
    error: str = ""


class Exam(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, the same on all machines."""

    asked: ExamOptions
    #: by number; who is missing here is in `absent`, with the reason
    facts: dict[int, Facts]
    absent: dict[int, str] = {}
    #: who could not be told all this in the end, and why
    untold: dict[int, str] = {}
    links: tuple[Link, ...] = ()
    #: how many seconds the clock of a machine is ahead of the first one's
    clocks: dict[int, float] = {}


class TellFacts(msgspec.Struct, frozen=True, tag=True):
    """What is your machine like?"""


class TellTime(msgspec.Struct, frozen=True, tag=True):
    """What time is it?"""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Try your link to that machine, and whether these of its ports can be reached."""

    receiver: int
    ports: tuple[int, ...]


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Answer at once."""


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Take what comes behind this, for as long, and say how much it was."""

    seconds: float


class Finish(msgspec.Struct, frozen=True, tag=True):
    """That is all; here is what was found."""

    exam: Exam


class Time(msgspec.Struct, frozen=True, tag=True):
    """Seconds since 1970."""

    now: float


class Received(msgspec.Struct, frozen=True, tag=True):
    """How many bytes came, in how many seconds."""

    count: int
    seconds: float


class Acknowledged(msgspec.Struct, frozen=True, tag="Done"):
    """It is done."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It is not done."""

    why: str


Request: TypeAlias = TellFacts | TellTime | Measure | Echo | Receive | Finish | AuthRequest | Proof
Reply: TypeAlias = Facts | Link | Time | Received | Acknowledged | Refused | Challenge | Proof
