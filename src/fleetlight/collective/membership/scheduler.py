# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a job without servers, which assigns indices, and the workers' side of that.

The scheduler runs the same script and trains nothing. It serves the store, and stays until the last
worker has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from fleetlight.collective.membership.diagnosis import Departure
from fleetlight.collective.membership.rendezvous import RendezvousDeadline, serve, store_errors
from fleetlight.errors import MembershipError, counted
from fleetlight.observe.log import logger
from fleetlight.roles import members
from fleetlight.roles.members import MemberHello
from fleetlight.roles.role import Role
from fleetlight.security.context import Contexts
from fleetlight.torch_compat.c10d import PrefixStore, Store

#: how long a worker may send no heartbeat before the scheduler calls it lost
SILENCE_S = 30.0
#: how long the scheduler waits, before it closes, for workers to read and write their last keys
LAST_READ_S = 5.0


def register(
    store: Store, role: Role, hello: MemberHello, deadline: RendezvousDeadline
) -> tuple[Role, MemberHello]:
    """Ask the scheduler for an index."""
    # longer than that of the scheduler, which can name the missing workers
    deadline = RendezvousDeadline(deadline.deadline_s + LAST_READ_S)
    with store_errors():
        arrival = store.add("worker/arrivals", 1) - 1
        store.set(f"worker/arrival/{arrival}", members.encode(hello).decode())
        answer = _wait_for_index(store, arrival, deadline, role.worker_num)
        if not answer.isdigit():
            raise MembershipError(f"the scheduler says: {answer}")
    return role.replace(index=int(answer)), msgspec.structs.replace(hello, index=int(answer))


def _wait_for_index(
    store: Store, arrival: int, deadline: RendezvousDeadline, worker_num: int
) -> str:
    """Read what the scheduler writes once all workers have joined."""
    key, fact = f"worker/index/{arrival}", "which worker this is"
    while not store.check([key]):
        if store.check(["refused"]):
            text = store.get("refused").decode()
            store.add("refusals heard", 1)
            raise MembershipError(f"the scheduler says: {text}")
        if not deadline.wait(lambda: f"waiting for the scheduler to say {fact}"):
            raise MembershipError(
                f"the scheduler did not say {fact} within {deadline.deadline_s:g} s: it waits "
                f"for {counted(worker_num, 'worker')}; did they all start?"
            )
    answer: bytes = store.get(key)
    return answer.decode()


class Scheduler:
    """Serves the store, assigns indices, and waits until all workers have left."""

    def __init__(self, role: Role, deadline_s: float, tls: Contexts | None = None) -> None:
        assert role.master is not None
        self._worker_num = role.worker_num
        self._deadline = RendezvousDeadline(deadline_s)
        store = serve(role.master, self._deadline, tls)
        self._store = PrefixStore(f"fleet/{role.restart}", store)
        self._silence_s = min(SILENCE_S, deadline_s)

    def run(self) -> int:
        """Serve until the job ends; returns the exit code."""
        try:
            indices = members.assign_indices(self._arrivals())
        except MembershipError as error:
            logger.error("%s", error)
            self._refuse(str(error))
            return 1
        for arrival, index in enumerate(indices):
            self._store.set(f"worker/index/{arrival}", str(index))
        logger.info("cluster formed: %s", counted(self._worker_num, "worker"))
        return self._watch()

    def _refuse(self, text: str) -> None:
        """Tell all workers that have joined why, and wait until they have read it."""
        self._store.set("refused", text)
        is_any = self._store.check(["worker/arrivals"])
        came = self._store.add("worker/arrivals", 0) if is_any else 0
        self._await(lambda: self._store.add("refusals heard", 0) >= came)

    def _await(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LAST_READ_S
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    def _arrivals(self) -> list[MemberHello]:
        came: list[MemberHello] = []
        while len(came) < self._worker_num and not self._all_introduced:
            if self._store.check([f"worker/arrival/{len(came)}"]):
                came.append(members.decode(self._store.get(f"worker/arrival/{len(came)}")))
            elif not self._deadline.wait(
                lambda: f"{len(came)} of {self._worker_num} workers have joined"
            ):
                raise MembershipError(
                    members.arrived_text(
                        "worker", self._worker_num, came, self._deadline.deadline_s
                    )
                )
        return came

    @property
    def _all_introduced(self) -> bool:
        """True once workers that know their indices themselves have met."""
        return bool(self._store.check([f"hello/{i}" for i in range(self._worker_num)]))

    def _watch(self) -> int:
        """Wait until all workers have left (0), or one fails or is silent (1)."""
        size = answered = self._worker_num
        seen: dict[int, tuple[bytes, float]] = {}
        while True:
            time.sleep(0.2)
            answered = self._refuse_surplus(answered)
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
        """The first failure of a worker."""
        for index in range(self._worker_num):
            if index not in present and (error := self._departure(index).error):
                return f"worker {index} failed: {error}"
        return None

    def _departure(self, index: int) -> Departure:
        return msgspec.json.decode(self._store.get(f"gone/{index}"), type=Departure)

    def _refuse_surplus(self, answered: int) -> int:
        """Tell workers that come too late that the job is complete; returns the arrivals."""
        while self._store.check([f"worker/arrival/{answered}"]):
            text = f"the job already has its {counted(self._worker_num, 'worker')}"
            self._store.set(f"worker/index/{answered}", text)
            answered += 1
        return answered

    def _silent(self, present: list[int], seen: dict[int, tuple[bytes, float]]) -> list[int]:
        now = time.monotonic()
        for index in present:
            known = self._store.check([f"beat/{index}"])
            beat = self._store.get(f"beat/{index}") if known else b""
            if index not in seen or seen[index][0] != beat:
                seen[index] = (beat, now)
        return [i for i in present if now - seen[i][1] > self._silence_s]
