# SPDX-License-Identifier: Apache-2.0
"""How a worker joins a running job: its requests, and the barriers that it has missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from fleetlight.errors import MembershipError
from fleetlight.ps import messages as m
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL

#: the server that decides at which turn a worker joins
_FIRST = 0


class KnownBarriers:
    """The results of the barriers before the first batch, for a worker that joins later."""

    def __init__(self, barriers: Sequence[tuple[str, list[bytes]]]) -> None:
        self._barriers = barriers
        self._next = 0

    def take(self, operation: str) -> list[bytes]:
        """The result of the next barrier with this operation."""
        for number in range(self._next, len(self._barriers)):
            name, values = self._barriers[number]
            if name == operation:
                self._next = number + 1
                return values
        known = ", ".join(dict.fromkeys(name for name, _ in self._barriers)) or "none"
        raise MembershipError(
            f"this worker joins a running job, and called {operation!r} before its first batch, "
            f"which the other workers have not done there (they called: {known}); run the script "
            "that they run"
        )


@dataclasses.dataclass(frozen=True)
class OfferedTurn:
    """A turn at which the worker may join."""

    loader: int
    turn: int
    #: the state of worker 0
    state: bytes


class RunningJob:
    """The requests of a worker that joins, and those of worker 0 that lets it join."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def known_barriers(self) -> KnownBarriers | None:
        """The barriers before the first batch; waits until a worker has reached it.

        None if the job ends before, as one without a loader with `deal="queue"` does.
        """
        while True:
            reply = self._client.ask(CONTROL, {_FIRST: (m.PreludeRequest(), ())})[_FIRST]
            if isinstance(reply.message, m.Admitted):
                return None
            if isinstance(reply.message, m.Prelude):
                left = iter(array.tobytes() for array in reply.arrays)
                found = zip(reply.message.operations, reply.message.counts, strict=True)
                return KnownBarriers([(name, [next(left) for _ in range(n)]) for name, n in found])

    def admitted(self, loader: int) -> OfferedTurn | None:
        """Wait for a turn over this loader; None if the job ends before."""
        while True:
            reply = self._client.ask(CONTROL, {_FIRST: (m.Admit(loader), ())})[_FIRST]
            if isinstance(reply.message, m.Admitted):
                if reply.message.is_over:
                    return None
                return OfferedTurn(loader, reply.message.turn, reply.arrays[0].tobytes())

    def enter(self, admission: OfferedTurn, phase: int) -> bool:
        """Take part from this phase on; False: ask again to be admitted."""
        message = m.Enter(phase, admission.loader, admission.turn)
        # server 0 holds the turn until all servers know this worker
        first = self._client.ask(CONTROL, {_FIRST: (message, ())})[_FIRST].message
        if not (isinstance(first, m.Entered) and first.is_member):
            return False
        self._client.ask(CONTROL, dict.fromkeys(range(1, self._client.server_num), (message, ())))
        return True

    def begin(self) -> None:
        """Let the turn begin: this worker is ready."""
        self._client.ask(CONTROL, {_FIRST: (m.EnteredAll(), ())})

    def offer(self, loader: int, turn: int, state: bytes | None) -> None:
        """Offer the state of this worker at the start of a turn; None: no worker can join there."""
        arrays = [] if state is None else [np.frombuffer(state, np.uint8)]
        self._client.ask(CONTROL, {_FIRST: (m.OfferState(loader, turn), arrays)})
