# SPDX-License-Identifier: Apache-2.0
"""`Roster`: which workers have come to a server, left it, or were lost. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fleetlight.errors import MembershipError, PeerLostError
from fleetlight.ps.messages import Hello

#: what has become of a worker
ABSENT, HERE, LEFT, LOST = "absent", "here", "left", "lost"


@dataclasses.dataclass
class _Seat:
    state: str = ABSENT
    incarnation: int = 0


class Roster:
    """The workers of a job, as one server knows them.

    The first worker that fails ends the job: everybody who asks later is told about it.
    """

    def __init__(self, server: int, server_num: int, worker_num: int, version: str) -> None:
        self._here = {"server": server, "server_num": server_num, "worker_num": worker_num}
        self._version = version
        self._seats = [_Seat() for _ in range(worker_num)]
        self._failure: str | None = None
        #: a server that is started again has its values still
        self._outlives = False

    def outlive(self, gone: Iterable[tuple[int, int]]) -> None:
        """Who has left in an earlier life of the server: worker and incarnation."""
        self._outlives = True
        for worker, incarnation in gone:
            self._seats[worker] = _Seat(LEFT, incarnation)

    def forget(self) -> None:
        """Nobody has come yet."""
        self._seats = [_Seat() for _ in self._seats]

    def gone(self) -> list[tuple[int, int]]:
        """Who has left: worker and incarnation."""
        return [(w, self._seats[w].incarnation) for w in self.those(LEFT)]

    def arrive(self, hello: Hello) -> None:
        """A worker opens a connection; an error says why it does not belong here."""
        self._check_fits(hello)
        seat = self._seats[hello.worker]
        if hello.joined and seat.state == ABSENT and not self._outlives:
            raise MembershipError(
                f"worker {hello.worker} has trained with an earlier life of this server, whose "
                "values are lost; start the whole job anew (durability='log' keeps them)"
            )
        if seat.state == LEFT and seat.incarnation == hello.incarnation and self._outlives:
            # its goodbye was heard, and the answer lost
            return
        if seat.state in (LEFT, LOST):
            raise MembershipError(
                f"worker {hello.worker} came back after it had {seat.state.replace('lost', 'gone')}"
                "; a job does not take workers in again, start the whole job anew"
            )
        if seat.state == HERE and seat.incarnation != hello.incarnation:
            raise MembershipError(
                f"there are two workers {hello.worker} (lives {seat.incarnation} and "
                f"{hello.incarnation}): it was started twice, or started again; every worker "
                "needs an index of its own, and a job is started again as a whole"
            )
        self._seats[hello.worker] = _Seat(HERE, hello.incarnation)

    def leave(self, worker: int, error: str = "") -> None:
        """A worker says goodbye, with an error when it has failed."""
        self._seats[worker].state = LEFT
        if error:
            self._fail(f"worker {worker} failed: {error}")

    def lose(self, worker: int, why: str) -> None:
        """A worker is gone without goodbye; nothing changes if it has left properly."""
        if self._seats[worker].state == HERE:
            self._seats[worker].state = LOST
            self._fail(f"worker {worker} went away without goodbye: {why}")

    def check(self) -> None:
        """Raise the first failure of a worker, if there was one."""
        if self._failure is not None:
            raise PeerLostError(self._failure)

    @property
    def failed(self) -> bool:
        """True when a worker has failed or was lost."""
        return self._failure is not None

    @property
    def is_over(self) -> bool:
        """True when all have left, and no one for an error."""
        return not self.failed and all(seat.state == LEFT for seat in self._seats)

    def incarnation(self, worker: int) -> int:
        """Which life of the worker is here."""
        return self._seats[worker].incarnation

    def those(self, *states: str) -> list[int]:
        """The workers in one of these states."""
        return [number for number, seat in enumerate(self._seats) if seat.state in states]

    def _fail(self, text: str) -> None:
        self._failure = self._failure or text

    def _check_fits(self, hello: Hello) -> None:
        if hello.fleetlight != self._version:
            raise MembershipError(
                f"worker {hello.worker} runs fleetlight {hello.fleetlight}, this server "
                f"{self._version}; use the same everywhere"
            )
        for fact, here in self._here.items():
            theirs = getattr(hello, fact)
            if theirs != here:
                raise MembershipError(
                    f"worker {hello.worker} expects {fact}={theirs}, but this server has "
                    f"{fact}={here}; give all processes the same endpoints in the same order"
                )
        if not 0 <= hello.worker < len(self._seats):
            raise MembershipError(
                f"a worker calls itself {hello.worker}, expected 0 to {len(self._seats) - 1}"
            )
