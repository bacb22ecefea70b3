# SPDX-License-Identifier: Apache-2.0
"""`Directory`: where the servers of a job listen. Pure: the caller says what time it is.

A server announces itself again and again. A process that replaces it gets a higher incarnation, and
from then on the directory refuses the older one. The directory may lose its memory: the servers
announce themselves to the next one, and workers tell it the incarnations that they know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fleetlight.errors import MembershipError
from fleetlight.ps.messages import Announce, Buckets, ServerEntry
from fleetlight.roles.role import Endpoint, endpoint_text

#: how long a server may be silent before another process may replace it
SILENCE_S = 5.0


class OccupiedError(Exception):
    """Another process has this index and may still run; ask again later."""


@dataclasses.dataclass
class _Server:
    process: str
    incarnation: int
    endpoint: Endpoint
    heard: float
    #: True if this directory chose the incarnation
    is_numbered_here: bool
    #: the buckets of ids whose rows it stores
    buckets: Buckets
    #: True once its connection has ended
    is_away: bool = False


class Directory:
    """The servers by their index, each with its newest process."""

    def __init__(self, server_num: int) -> None:
        self._server_num = server_num
        self._servers: dict[int, _Server] = {}
        #: by index: the newest process that workers have reported
        self._reported: dict[int, ServerEntry] = {}
        #: servers that have said goodbye
        self._departed: set[int] = set()

    def announce(self, process: str, message: Announce, now: float) -> int:
        """A server says where it listens; returns its incarnation.

        Raises `OccupiedError` while an older process of the same index may run.
        """
        if message.server >= self._server_num:
            raise MembershipError(
                f"a server announces index {message.server}, expected 0 to {self._server_num - 1}"
            )
        here = self._servers.get(message.server)
        self._refuse_shared_buckets(message)
        if here is not None and here.process == process:
            here.endpoint, here.heard, here.is_away = (message.host, message.port), now, False
            return here.incarnation
        incarnation = message.incarnation or self._next_incarnation(message, here, now)
        self._refuse_older(message, incarnation, here)
        self._servers[message.server] = _Server(
            process=process,
            incarnation=incarnation,
            endpoint=(message.host, message.port),
            heard=now,
            is_numbered_here=not message.incarnation,
            buckets=message.buckets,
        )
        return incarnation

    def _refuse_shared_buckets(self, message: Announce) -> None:
        """Refuse a server that stores rows of another one."""
        for index, server in self._servers.items():
            if index == message.server:
                continue
            for first, stop in message.buckets:
                for other, end in server.buckets:
                    if first < end and other < stop:
                        raise MembershipError(
                            f"server {message.server} announces buckets {first} to {stop - 1}, but "
                            f"server {index} stores {other} to {end - 1}; start all servers with "
                            "the same number of servers and the same version"
                        )

    def lose(self, process: str) -> None:
        """The connection of a server has ended."""
        for server in self._servers.values():
            if server.process == process:
                server.is_away = True

    def process_of(self, server: int) -> str | None:
        """The newest process of a server, if it has announced itself."""
        here = self._servers.get(server)
        return None if here is None else here.process

    def depart(self, server: int) -> None:
        """A server says goodbye at the end of the job."""
        self._departed.add(server)

    def learn(self, known: Iterable[ServerEntry]) -> None:
        """A worker reports the newest processes that it knows."""
        for entry in known:
            if 0 <= entry.server < self._server_num:
                self._learn(entry)

    def _learn(self, known: ServerEntry) -> None:
        if known.incarnation > self._newest(known.server):
            self._reported[known.server] = known
        here = self._servers.get(known.server)
        if here is None or here.process == known.process or here.incarnation > known.incarnation:
            return
        if here.is_numbered_here or here.incarnation == known.incarnation:
            # a directory without memory gave it a number that another process had
            here.incarnation = known.incarnation + 1
        else:
            # the caller knows a newer one
            del self._servers[known.server]

    def _newest(self, server: int) -> int:
        """The highest incarnation that workers have reported."""
        reported = self._reported.get(server)
        return 0 if reported is None else reported.incarnation

    @property
    def is_over(self) -> bool:
        """True once all servers have said goodbye."""
        return len(self._departed) == self._server_num

    def silent_s(self, now: float) -> float:
        """How long no server has announced itself; 0 if none ever has."""
        return min((now - server.heard for server in self._servers.values()), default=0.0)

    def missing(self) -> list[int]:
        """The servers that have not announced themselves."""
        return [index for index in range(self._server_num) if index not in self._servers]

    def vacant(self, now: float) -> list[int]:
        """The servers that may be replaced."""
        return [
            index
            for index, server in sorted(self._servers.items())
            if server.is_away or now - server.heard > SILENCE_S
        ]

    def entries(self) -> list[ServerEntry]:
        """The servers that have announced themselves, in the order of their indices."""
        return [
            ServerEntry(index, server.incarnation, server.process, *server.endpoint, server.buckets)
            for index, server in sorted(self._servers.items())
        ]

    def occupied_text(self, message: Announce, now: float) -> str:
        """The error for a process whose index another one keeps."""
        here = self._servers[message.server]
        return (
            f"there are two servers {message.server}: one listens at "
            f"{endpoint_text(here.endpoint)} and announced itself {now - here.heard:.1f} s ago, "
            f"the other at {endpoint_text((message.host, message.port))}; give each server its own "
            "index, and end the older process before you start another"
        )

    def _next_incarnation(self, message: Announce, here: _Server | None, now: float) -> int:
        """The number of a process that has none yet."""
        if here is not None and message.server not in self.vacant(now):
            raise OccupiedError
        newest = 0 if here is None else here.incarnation
        return max(newest, self._newest(message.server)) + 1

    def _refuse_older(self, message: Announce, incarnation: int, here: _Server | None) -> None:
        """Refuse a process that another one has replaced."""
        newest = self._newest(message.server) if here is None else here.incarnation
        if incarnation < newest or (here is not None and incarnation == newest):
            where = "" if here is None else f", which listens at {endpoint_text(here.endpoint)}"
            relation = "has the same number as" if incarnation == newest else "is older than"
            raise MembershipError(
                f"server {message.server}, incarnation {incarnation}, {relation} incarnation "
                f"{newest}{where}; end this process"
            )
