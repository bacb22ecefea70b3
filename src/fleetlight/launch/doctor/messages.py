# SPDX-License-Identifier: Apache-2.0
"""The messages of doctors, and the results of an examination."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fleetlight.security.token import AuthRequest, Challenge, Proof


class ExamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an examination, equal on all machines."""

    #: the machines as the user wrote them, and their addresses on this machine
    names: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    port: int = 0
    #: workers of a machine; they and their store use the ports after `port`
    workers: int = 1
    seconds: float = 1.0

    @property
    def ports(self) -> range:
        """The ports that the processes of a job use on each machine."""
        return range(self.port + 1, self.port + self.workers + 2)


class Facts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The facts about one machine."""

    asked: ExamOptions = ExamOptions()
    #: the host name, and the address that it resolves to on this machine
    name: str = ""
    name_address: str | None = None
    fleetlight: str = ""
    torch: str = ""
    python: str = ""
    system: str = ""
    cores: int = 1
    gpus: int = 0
    #: bytes of memory, and of shared memory
    memory: int = 0
    shared_memory: int | None = None
    #: how many files a process may open
    files: int | None = None
    #: OMP_NUM_THREADS
    threads: str | None = None
    interface: str | None = None
    mtu: int | None = None
    #: the reason for each unavailable port
    taken: dict[int, str] = {}
    #: ports at which the doctor listens: those of a job, and one free port
    listening: tuple[int, ...] = ()


class Link(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The measurement from one machine to another, by their numbers."""

    sender: int
    receiver: int
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    #: the reason for each unreachable port
    closed: dict[int, str] = {}
    #: why the measurement failed
    error: str = ""


class Exam(msgspec.Struct, frozen=True, kw_only=True):
    """The results, equal on all machines."""

    asked: ExamOptions
    #: by number; `absent` has the reasons for the other machines
    facts: dict[int, Facts]
    absent: dict[int, str] = {}
    #: the machines that did not receive the results, and why
    uninformed: dict[int, str] = {}
    links: tuple[Link, ...] = ()
    #: by how many seconds a machine's clock is ahead of that of the first
    clocks: dict[int, float] = {}


class GetFacts(msgspec.Struct, frozen=True, tag=True):
    """Request the machine's facts."""


class GetTime(msgspec.Struct, frozen=True, tag=True):
    """Request the machine's time."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Request a measurement of the link to a machine, and a check of its ports."""

    receiver: int
    ports: tuple[int, ...]


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Request an immediate reply."""


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Request to receive the bytes that follow for `seconds`, and to report their number."""

    seconds: float


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The results, at the end of the examination."""

    exam: Exam


class Time(msgspec.Struct, frozen=True, tag=True):
    """Seconds since 1970."""

    now: float


class Received(msgspec.Struct, frozen=True, tag=True):
    """The number of bytes that arrived, and in how many seconds."""

    count: int
    seconds: float


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The request succeeded."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request is refused."""

    why: str


Request: TypeAlias = GetFacts | GetTime | Measure | Echo | Receive | Finish | AuthRequest | Proof
Reply: TypeAlias = Facts | Link | Time | Received | Acknowledged | Refused | Challenge | Proof
