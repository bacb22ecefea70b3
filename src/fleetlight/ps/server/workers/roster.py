# SPDX-License-Identifier: Apache-2.0
"""`Roster`: which workers are connected to a server, have left it, or were lost. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from fleetlight.errors import MembershipError, PeerLostError
from fleetlight.ps.messages import Greeting

#: the states of a worker; a worker that is away may restart, and a vacant place has none yet
ABSENT, HERE, AWAY, LEFT, LOST, VACANT = "absent", "here", "away", "left", "lost", "vacant"
#: how long a place is kept for the worker that has asked for it
_KEPT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Peer:
    """The worker at the other end of a connection."""

    worker: int
    started_at: int
    lane: str
    incarnation: int = 1

    def __str__(self) -> str:
        return f"worker {self.worker}"


@dataclasses.dataclass
class _Member:
    state: str = ABSENT
    started_at: int = 0
    incarnation: int = 1
    #: how long the worker may be away or absent
    away_s: float = math.inf
    #: when the worker became away or left, and why it is away
    since: float = 0.0
    why: str = ""
    #: True if the worker has left and received the reply to its goodbye
    confirmed: bool = False
    #: True if the worker joins the running job, and takes part in nothing yet
    joining: bool = False


class Roster:
    """The workers of a job, as one server knows them.

    The first worker that fails ends the job: every later request fails with its error.
    """

    def __init__(
        self,
        server: int,
        server_num: int,
        worker_num: int,
        version: str,
        places: int | None = None,
    ) -> None:
        """`places`: how many workers the job may have while it runs; None: it keeps its workers."""
        self._here: dict[str, int | None] = {
            "server": server,
            "server_num": server_num,
            "worker_num": worker_num,
            "worker_max": places,
        }
        self._worker_num = worker_num
        self._version = version
        self._members = [
            _Member(ABSENT if worker < worker_num else VACANT)
            for worker in range(places or worker_num)
        ]
        #: True where workers join and leave while the job runs
        self.is_elastic = places is not None
        #: by place: the start of the worker that has asked for it, and when it did
        self._kept: dict[int, tuple[int, float]] = {}
        self._failure: str | None = None
        #: True if this server recovered its values after a restart
        self._is_recovered = False
        #: True when the job continues without a lost worker; worker 0 is always needed
        self.tolerates_loss = self.is_elastic

    def place_for(self, started_at: int, now: float) -> int | None:
        """A free place for a worker that will join; None if there is none."""
        self._check_runs()
        for place, (started, since) in list(self._kept.items()):
            if started == started_at:
                return place
            if now - since > _KEPT_S:
                del self._kept[place]
        free = [
            worker
            for worker in self.in_state(VACANT, LEFT, LOST)
            if worker and worker not in self._kept and not self._may_repeat_goodbye(worker, now)
        ]
        if not free or not self.is_elastic:
            return None
        # a place that no worker has had is better for the logs
        place = min(free, key=lambda worker: (self._members[worker].state != VACANT, worker))
        self._kept[place] = started_at, now
        return place

    def _may_repeat_goodbye(self, worker: int, now: float) -> bool:
        """True while the reply to the goodbye of a worker may be lost."""
        member = self._members[worker]
        is_sure = member.confirmed or member.joining
        return member.state == LEFT and not is_sure and now - member.since < _KEPT_S

    def _check_runs(self) -> None:
        """Refuse a worker that joins once all others have left: the server is about to end."""
        if self.is_elastic and not self.active:
            raise MembershipError("the job has ended before this worker could join; start another")

    def enter(self, worker: int) -> None:
        """A worker that joins takes part from now on."""
        self._members[worker].joining = False

    def has_entered(self, worker: int, started_at: int) -> bool:
        """True if this worker takes part."""
        member = self._members[worker]
        return member.started_at == started_at and not member.joining

    @property
    def worker_num(self) -> int:
        """The number of workers that start with the job."""
        return self._worker_num

    @property
    def places(self) -> int:
        """The number of workers that the job may have."""
        return len(self._members)

    @property
    def active(self) -> int:
        """The number of workers that take part and have not left."""
        return len(self.taking_part())

    def restore_gone(self, gone: Iterable[tuple[int, int, bool]]) -> None:
        """Restore the workers that `gone` returned in an earlier incarnation."""
        self._is_recovered = True
        for worker, started_at, lost in gone:
            member = self._members[worker]
            if member.started_at > started_at:
                # another worker has taken the place while this server recovers
                continue
            incarnation = member.incarnation if member.started_at == started_at else 1
            self._members[worker] = _Member(LOST if lost else LEFT, started_at, incarnation)

    def gone(self) -> list[tuple[int, int, bool]]:
        """Workers that the job continues without: worker, first start, and whether it was lost."""
        gone = self.in_state(LEFT) + [w for w in self.in_state(LOST) if not self._is_needed(w)]
        return [(w, self._members[w].started_at, w in self.in_state(LOST)) for w in sorted(gone)]

    def arrivals(self) -> list[tuple[int, int, int]]:
        """Workers that have connected: worker, first start, and newest incarnation."""
        members = enumerate(self._members)
        return [
            (worker, member.started_at, member.incarnation)
            for worker, member in members
            if member.started_at
        ]

    def joining(self) -> list[int]:
        """The workers that have connected and take part in nothing yet."""
        return [worker for worker, member in enumerate(self._members) if member.joining]

    def taking_part(self) -> list[int]:
        """The workers that take part and have not left."""
        states = (ABSENT, HERE, AWAY)
        return [w for w, m in enumerate(self._members) if m.state in states and not m.joining]

    def restore_arrivals(
        self, arrivals: Iterable[tuple[int, int, int]], joining: Iterable[int] | None = None
    ) -> None:
        """Restore the workers that `arrivals` returned in an earlier incarnation.

        `joining`: what `joining` returned; None: a worker in a free place joins.
        """
        joins = None if joining is None else set(joining)
        for worker, started_at, incarnation in arrivals:
            member = self._members[worker]
            takes = member.state == VACANT or (
                member.state in (LEFT, LOST) and member.started_at != started_at
            )
            if takes:
                is_joining = joins is None or worker in joins
                self._members[worker] = _Member(ABSENT, started_at, incarnation, joining=is_joining)
            elif member.state == ABSENT:
                member.started_at, member.incarnation = started_at, incarnation
                member.joining = joins is not None and worker in joins
            elif member.started_at == started_at:
                member.incarnation = max(member.incarnation, incarnation)

    def expect(self, now: float, away_s: float, parting_s: float = 0.0) -> None:
        """Count workers known from an earlier incarnation as away from now on.

        Workers that have left may take `parting_s` longer to say goodbye again.
        """
        for member in self._members:
            if member.state == LEFT:
                member.since = now + parting_s
            if member.state == ABSENT and member.started_at:
                member.since, member.away_s = now, away_s
                member.why = "this server was restarted"

    def arrive(self, greeting: Greeting) -> bool:
        """Admit a worker that connects; an error says why it does not belong here.

        Return True if the worker has restarted.
        """
        self._check_fits(greeting)
        member = self._members[greeting.worker]
        if self._takes_place(greeting, member):
            self._check_runs()
            self._kept.pop(greeting.worker, None)
            self._members[greeting.worker] = _Member(
                HERE, greeting.started_at, greeting.incarnation, greeting.away_s, joining=True
            )
            return False
        if member.state == VACANT:
            raise MembershipError(
                f"worker {greeting.worker} does not belong to the {self._worker_num} that "
                "start with the job; give a worker that joins later FLEET_JOIN, the host:port of "
                "server 0"
            )
        if self.is_elastic and not greeting.joins:
            # also after a restart, while this server waits for the worker that has the place now
            self._check_place(greeting.worker, greeting.started_at)
        is_same = member.started_at == greeting.started_at
        if greeting.joins and not is_same:
            self._refuse_taken(greeting, member)
        if is_same:
            self.check_incarnation(greeting.worker, greeting.incarnation)
        if greeting.joined and member.state == ABSENT and not self._is_recovered:
            raise MembershipError(
                f"worker {greeting.worker} trained with an earlier incarnation of this server, "
                "whose values are lost; restart the whole job (durability='log' keeps the values)"
            )
        may_repeat = (
            self._is_recovered or greeting.joined or greeting.incarnation > member.incarnation
        )
        if member.state == LEFT and is_same and may_repeat:
            # the server received its goodbye, and the reply was lost
            member.incarnation = greeting.incarnation
            return False
        if member.state in (LEFT, LOST):
            end = "it had left" if member.state == LEFT else "it was lost"
            raise MembershipError(
                f"worker {greeting.worker} returned after {end}; a job does not admit a worker "
                "again, restart the whole job"
            )
        if member.state in (HERE, AWAY) and not is_same:
            raise MembershipError(
                f"there are two workers {greeting.worker} (started at {member.started_at} and "
                f"{greeting.started_at}): it was started twice, or restarted alone; give every "
                "worker its own index, and restart a job as a whole"
            )
        self._members[greeting.worker] = _Member(
            HERE,
            greeting.started_at,
            greeting.incarnation,
            greeting.away_s,
            joining=member.joining and is_same,
        )
        return is_same and greeting.incarnation > member.incarnation

    def _takes_place(self, greeting: Greeting, member: _Member) -> bool:
        """True for a worker that joins in a place without a worker."""
        if not greeting.joins or not self.is_elastic or not greeting.worker:
            return False
        is_free = member.state in (VACANT, LEFT, LOST)
        return is_free and greeting.started_at != member.started_at

    def _refuse_taken(self, greeting: Greeting, member: _Member) -> None:
        """Refuse a worker that joins in a place whose last worker is not given up here."""
        if self._here["server"] and member.started_at < greeting.started_at:
            # the worker tries again: server 0 has given up the last one, and this server will
            raise PeerLostError(
                f"server {self._here['server']} has not yet given up the last worker in place "
                f"{greeting.worker}"
            )
        raise MembershipError(
            f"place {greeting.worker} was taken by another worker that joins; start this one again"
        )

    def check_process(self, peer: Peer) -> None:
        """Refuse a process if a newer process has replaced it, or has taken its place."""
        self.check_incarnation(peer.worker, peer.incarnation)
        self._check_place(peer.worker, peer.started_at)

    def _check_place(self, worker: int, started_at: int) -> None:
        if started_at < self._members[worker].started_at:
            raise MembershipError(
                f"worker {worker} has left the job or was lost, and another worker has its place; "
                "end this process"
            )

    def check_incarnation(self, worker: int, incarnation: int) -> None:
        """Refuse a process if a newer process has replaced it."""
        now = self._members[worker].incarnation
        if incarnation < now:
            raise MembershipError(
                f"worker {worker} has been restarted (incarnation {now}), but its incarnation "
                f"{incarnation} still calls; end the older process"
            )

    def check_trains(self, worker: int) -> None:
        """Refuse the request of a worker that the job continues without."""
        if self._members[worker].state in (LEFT, LOST):
            raise MembershipError(
                f"worker {worker} has left the job or was lost, and the other workers continue "
                "without it; the server refuses its pushes, end this process"
            )

    def check_pushes(self, worker: int) -> None:
        """Refuse a push of a worker that does not take part."""
        if self._members[worker].joining:
            raise MembershipError(
                f"worker {worker} joins a running job, and made a step before it takes part; it "
                "does so in its first loop over a loader of fleet.shard(loader, deal='queue')"
            )
        self.check_trains(worker)

    def leave(self, worker: int, now: float, error: str = "") -> None:
        """A worker says goodbye, with an error if it failed; a lost worker stays lost."""
        member = self._members[worker]
        if member.state not in (LEFT, LOST):
            member.state, member.since = LEFT, now
        if error and self._is_needed(worker):
            self._fail(f"worker {worker} failed: {error}")

    def confirm(self, worker: int) -> None:
        """A worker that has left received the reply to its goodbye, and does not repeat it."""
        member = self._members[worker]
        member.confirmed = member.state == LEFT

    def lose(self, worker: int, why: str, now: float) -> None:
        """A worker disconnects without goodbye; no effect if it has left."""
        member = self._members[worker]
        if member.state != HERE:
            return
        member.since, member.why = now, why
        member.state = AWAY
        if not member.away_s and self._is_needed(worker):
            self._lose(worker)

    def is_away(self, worker: int) -> bool:
        """True while the worker is away and may return."""
        return self._members[worker].state == AWAY

    def come_back(self, worker: int, started_at: int, incarnation: int) -> None:
        """A worker that was away sends a request; no effect if it is another process."""
        member = self._members[worker]
        if member.state == AWAY and (member.started_at, member.incarnation) == (
            started_at,
            incarnation,
        ):
            member.state = HERE

    def overdue(self, now: float) -> list[int]:
        """Workers that have been away for too long, even since an earlier incarnation."""
        away = [(worker, self._members[worker]) for worker in self.in_state(ABSENT, AWAY)]
        return [worker for worker, member in away if now - member.since > member.away_s]

    def give_up(self, now: float) -> list[tuple[int, str]]:
        """Give up overdue workers; return those that the job continues without, and why."""
        lost = []
        for worker in self.overdue(now):
            member = self._members[worker]
            member.why += f"; it has not returned for {member.away_s:g} s" if member.away_s else ""
            lost.append((worker, self._lose(worker)))
        return [(worker, why) for worker, why in lost if not self._is_needed(worker)]

    def _lose(self, worker: int) -> str:
        member = self._members[worker]
        member.state = LOST
        text = f"worker {worker} disconnected without goodbye: {member.why}"
        if self._is_needed(worker):
            self._fail(text)
        return text

    def is_lost(self, worker: int) -> bool:
        """True once the server has given up the worker."""
        return self._members[worker].state == LOST

    def _is_needed(self, worker: int) -> bool:
        return not (self.tolerates_loss and worker)

    def check(self) -> None:
        """Raise the first failure of a worker, if any."""
        if self._failure is not None:
            raise PeerLostError(self._failure)

    @property
    def failed(self) -> bool:
        """True when a worker has failed or was lost."""
        return self._failure is not None

    @property
    def is_over(self) -> bool:
        """True once all workers have left or were lost, without a failure of the job."""
        over = (LEFT, LOST, VACANT)
        return not self.failed and all(member.state in over for member in self._members)

    def unconfirmed_since(self) -> float:
        """When the last worker left that may have no reply to its goodbye and repeat it."""
        left = [member for member in self._members if member.state == LEFT]
        return max((member.since for member in left if not member.confirmed), default=-math.inf)

    def started_at(self, worker: int) -> int:
        """When the worker first started; 0 if it has never connected or cannot."""
        is_known = 0 <= worker < len(self._members)
        return self._members[worker].started_at if is_known else 0

    def in_state(self, *states: str) -> list[int]:
        """The workers in one of these states."""
        return [number for number, member in enumerate(self._members) if member.state in states]

    def _fail(self, text: str) -> None:
        self._failure = self._failure or text

    def _check_fits(self, greeting: Greeting) -> None:
        if greeting.fleetlight != self._version:
            raise MembershipError(
                f"worker {greeting.worker} runs fleetlight {greeting.fleetlight}, this server "
                f"{self._version}; use one version everywhere"
            )
        for fact, here in self._here.items():
            theirs = getattr(greeting, fact)
            if theirs != here:
                advice = (
                    "endpoints in the same order" if fact != "worker_max" else "FLEET_WORKER_MAX"
                )
                raise MembershipError(
                    f"worker {greeting.worker} expects {fact}={theirs}, but this server has "
                    f"{fact}={here}; give all processes the same {advice}"
                )
        if not 0 <= greeting.worker < len(self._members):
            raise MembershipError(
                f"a worker has index {greeting.worker}, expected 0 to {len(self._members) - 1}"
            )
