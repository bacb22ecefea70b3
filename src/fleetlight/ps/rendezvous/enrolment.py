# SPDX-License-Identifier: Apache-2.0
"""`Enrolment`: which processes are the members of one kind, and their indices. Pure."""

from __future__ import annotations

from collections.abc import Collection

from fleetlight.errors import MembershipError, counted
from fleetlight.ps.messages import Enrolled
from fleetlight.roles.members import (
    MemberHello,
    arrived_text,
    assign_indices,
    claimed_index,
    place_of,
)


class SurplusError(Exception):
    """All indices are taken by processes that may still run; ask again later."""


class Enrolment:
    """The members of one kind: `count` of them, without indices until the last has arrived.

    A process is known by a random name.
    """

    def __init__(self, kind: str, count: int) -> None:
        self._kind, self._count = kind, count
        #: by process, in the order of arrival, until all have an index
        self._arrived: dict[str, MemberHello] = {}
        #: those of them without a connection
        self._away: set[str] = set()
        #: by index, once all have arrived
        self._processes: list[str] = []
        self.members: list[MemberHello] = []

    @property
    def is_complete(self) -> bool:
        """True once every member has an index."""
        return bool(self.members)

    def arrive(self, process: str, hello: MemberHello, vacant: Collection[int] = ()) -> None:
        """A process arrives; `vacant` are indices whose process is known to have ended.

        One that knows its index replaces the member that has it. Raises `SurplusError` if there is
        no index for the process.
        """
        self._away.discard(process)
        if process in self._arrived or process in self._processes:
            return
        if self.is_complete:
            self._replace(process, hello, vacant)
            return
        self._forget_former(hello)
        self._arrived[process] = hello
        if len(self._arrived) == self._count:
            self._assign(process)

    def lose(self, process: str) -> None:
        """The connection of a process has ended, and so may have the process."""
        hello = self._arrived.get(process)
        if hello is None:
            return
        self._away.add(process)
        if claimed_index(hello) is None:
            del self._arrived[process]

    def process_of(self, index: int) -> str | None:
        """The newest process with an index, once all have one."""
        return self._processes[index] if index < len(self._processes) else None

    def answer(self, process: str) -> Enrolled:
        """The index and place of a process, once all have arrived."""
        if process not in self._processes:
            raise MembershipError(f"another process has replaced this {self._kind}; end this one")
        index = self._processes.index(process)
        return Enrolled(index, place_of([member.address for member in self.members], index))

    def missing_text(self, deadline_s: float) -> str:
        """The error where members are missing at the deadline."""
        return arrived_text(self._kind, self._count, self._arrived.values(), deadline_s)

    def surplus_text(self) -> str:
        """The error for a process that has no index."""
        return (
            f"the job already has its {counted(self._count, self._kind)}; end this process, or "
            "give it the index of the one that it replaces"
        )

    def progress(self) -> str:
        """How many members have arrived."""
        here = self._count if self.is_complete else len(self._arrived)
        return f"{here} of {counted(self._count, self._kind)} joined"

    def _forget_former(self, hello: MemberHello) -> None:
        """Forget a process that has ended, and claimed the index of this one."""
        index = claimed_index(hello)
        for process in list(self._away & self._arrived.keys()):
            if index is not None and claimed_index(self._arrived[process]) == index:
                del self._arrived[process]

    def _assign(self, last: str) -> None:
        processes, hellos = list(self._arrived), list(self._arrived.values())
        try:
            indices = assign_indices(hellos)
        except MembershipError:
            del self._arrived[last]
            raise
        order = sorted(range(self._count), key=lambda arrival: indices[arrival])
        self._processes = [processes[arrival] for arrival in order]
        self.members = [hellos[arrival] for arrival in order]
        self._arrived.clear()

    def _replace(self, process: str, hello: MemberHello, vacant: Collection[int]) -> None:
        index = claimed_index(hello)
        if index is None:
            index = min(vacant, default=None)
        if index is None or not 0 <= index < self._count:
            raise SurplusError
        self._processes[index], self.members[index] = process, hello
