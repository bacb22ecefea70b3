# SPDX-License-Identifier: Apache-2.0
"""The scheduler, which assigns indices to members, and the members' side of that.

The scheduler runs the same script and trains nothing. It serves the store, tells all members where
the servers listen, and stays until the last member has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from fleetlight.collective.membership import members
from fleetlight.collective.membership.diagnosis import Departure
from fleetlight.collective.membership.members import MemberHello
from fleetlight.collective.membership.rendezvous import RendezvousDeadline, serve, store_errors
from fleetlight.errors import MembershipError, counted
from fleetlight.observe.log import logger
from fleetlight.roles.role import Endpoint, Kind, Role
from fleetlight.security.context import Contexts
from fleetlight.torch_compat.c10d import PrefixStore, Store

#: the key of the servers' endpoints
SERVERS = "server/endpoints"
#: how long a member may send no heartbeat before the scheduler calls it lost
SILENCE_S = 30.0
#: how long the scheduler waits, before it closes, for members to read and write their last keys
LAST_READ_S = 5.0


def register(
    store: Store, role: Role, hello: MemberHello, deadline: RendezvousDeadline
) -> tuple[Role, MemberHello]:
    """Ask the scheduler for an index and for the servers' endpoints."""
    kind = role.kind.value
    # longer than that of the scheduler, which can name the missing members
    deadline = RendezvousDeadline(deadline.deadline_s + LAST_READ_S)
    with store_errors():
        arrival = store.add(f"{kind}/arrivals", 1) - 1
        store.set(f"{kind}/arrival/{arrival}", members.encode(hello).decode())
        key, fact = f"{kind}/index/{arrival}", f"which {kind} this is"
        answer = _wait_for(store, key, deadline, fact, _members(role)).decode()
        if not answer.isdigit():
            raise MembershipError(f"the scheduler says: {answer}")
        role = role.replace(index=int(answer))
        if role.server_num:
            role = role.replace(server_endpoints=_servers(store, role, deadline))
    return role, msgspec.structs.replace(hello, index=role.index)


def _wait_for(
    store: Store, key: str, deadline: RendezvousDeadline, fact: str, members: str
) -> bytes:
    """Read what the scheduler writes once all `members` have joined; `fact` is for errors."""
    while not store.check([key]):
        if store.check(["refused"]):
            text = store.get("refused").decode()
            store.add("refusals heard", 1)
            raise MembershipError(f"the scheduler says: {text}")
        if not deadline.wait(lambda: f"waiting for the scheduler to say {fact}"):
            raise MembershipError(
                f"the scheduler did not say {fact} within {deadline.deadline_s:g} s: it waits "
                f"for {members}; did they all start?"
            )
    answer: bytes = store.get(key)
    return answer


def _servers(store: Store, role: Role, deadline: RendezvousDeadline) -> tuple[Endpoint, ...]:
    """The endpoints of the servers, in the order of their indices."""
    servers = counted(role.server_num, "server")
    answer = _wait_for(store, SERVERS, deadline, "where the servers listen", servers)
    return tuple(msgspec.json.decode(answer, type=list[Endpoint]))


def report_server_failure(store: Store, role: Role, error: str) -> None:
    """Tell the scheduler that a server with an index does not serve."""
    store.set(f"failed/{role.index}", error)


class Scheduler:
    """Serves the store, assigns indices, and waits until all members have left."""

    def __init__(self, role: Role, deadline_s: float, tls: Contexts | None = None) -> None:
        assert role.master is not None
        self._role = role
        self._deadline = RendezvousDeadline(deadline_s)
        store = serve(role.master, self._deadline, tls)
        self._store = PrefixStore(f"fleet/{role.restart}", store)
        self._silence_s = min(SILENCE_S, deadline_s)

    def run(self) -> int:
        """Serve until the job ends; returns the exit code."""
        try:
            workers = self._arrivals("worker", self._role.worker_num)
            self._assign_indices("worker", workers)
            if self._role.server_num:
                servers = self._arrivals("server", self._role.server_num)
                members.check_reachable(servers, workers)
                self._assign_indices("server", servers)
        except MembershipError as error:
            logger.error("%s", error)
            self._refuse(str(error))
            return 1
        logger.info("cluster formed: %s", _members(self._role))
        return self._watch()

    def _refuse(self, text: str) -> None:
        """Tell all members that have joined why, and wait until they have read it."""
        self._store.set("refused", text)
        arrivals = [f"{kind}/arrivals" for kind in ("worker", "server")]
        came = sum(self._store.add(key, 0) for key in arrivals if self._store.check([key]))
        self._await(lambda: self._store.add("refusals heard", 0) >= came)

    def _await(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LAST_READ_S
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    def _arrivals(self, kind: str, expected: int) -> list[MemberHello]:
        came: list[MemberHello] = []
        while len(came) < expected:
            if self._store.check([f"{kind}/arrival/{len(came)}"]):
                came.append(members.decode(self._store.get(f"{kind}/arrival/{len(came)}")))
            elif not self._deadline.wait(_progress(kind, came, expected)):
                text = members.arrived_text(kind, expected, came, self._deadline.deadline_s)
                raise MembershipError(text)
        return came

    def _assign_indices(self, kind: str, hellos: Sequence[MemberHello]) -> None:
        indices = members.assign_indices(hellos)
        for arrival, index in enumerate(indices):
            self._store.set(f"{kind}/index/{arrival}", str(index))
        if kind == Kind.SERVER.value:
            ordered = sorted(zip(indices, hellos, strict=True), key=lambda pair: pair[0])
            endpoints = [(hello.address, hello.port) for _, hello in ordered]
            self._store.set(SERVERS, msgspec.json.encode(endpoints).decode())

    def _watch(self) -> int:
        """Wait until all workers have left (0), or one fails or is silent (1)."""
        size = self._role.worker_num
        seen: dict[int, tuple[bytes, float]] = {}
        answered = {"worker": size, "server": self._role.server_num}
        while True:
            time.sleep(0.2)
            self._refuse_surplus(answered)
            present = [i for i in range(size) if not self._store.check([f"gone/{i}"])]
            if failure := self._failure(present):
                logger.error("%s", failure)
                return 1
            if not present:
                # workers that have departed may still wait for the departure of others
                self._await(lambda: self._store.check([f"left/{i}" for i in range(size)]))
                logger.info("all %s have left", counted(size, "worker"))
                return 0
            if silent := self._silent(present, seen):
                logger.error("no heartbeat from worker %s for %g s", silent, self._silence_s)
                return 1

    def _failure(self, present: list[int]) -> str | None:
        """The first failure of a worker or server."""
        for index in range(self._role.worker_num):
            if index not in present and (error := self._departure(index).error):
                return f"worker {index} failed: {error}"
        for index in range(self._role.server_num):
            if self._store.check([f"failed/{index}"]):
                return f"server {index} failed: {self._store.get(f'failed/{index}').decode()}"
        return None

    def _departure(self, index: int) -> Departure:
        return msgspec.json.decode(self._store.get(f"gone/{index}"), type=Departure)

    def _refuse_surplus(self, answered: dict[str, int]) -> None:
        """Tell members that come too late that the job is complete; counts them."""
        expected = {"worker": self._role.worker_num, "server": self._role.server_num}
        for kind, count in expected.items():
            while self._store.check([f"{kind}/arrival/{answered[kind]}"]):
                text = f"the job already has its {counted(count, kind)}"
                self._store.set(f"{kind}/index/{answered[kind]}", text)
                answered[kind] += 1

    def _silent(self, present: list[int], seen: dict[int, tuple[bytes, float]]) -> list[int]:
        now = time.monotonic()
        for index in present:
            known = self._store.check([f"beat/{index}"])
            beat = self._store.get(f"beat/{index}") if known else b""
            if index not in seen or seen[index][0] != beat:
                seen[index] = (beat, now)
        return [i for i in present if now - seen[i][1] > self._silence_s]


def _progress(kind: str, came: list[MemberHello], expected: int) -> Callable[[], str]:
    return lambda: f"{len(came)} of {expected} {kind}s have joined"


def _members(role: Role) -> str:
    servers = f" and {counted(role.server_num, 'server')}" if role.server_num else ""
    return counted(role.worker_num, "worker") + servers
