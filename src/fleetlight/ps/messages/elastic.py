# SPDX-License-Identifier: Apache-2.0
"""A worker joins a job that is running."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.ps.messages.base import MessageBase


class PlaceRequest(MessageBase, frozen=True):
    """The first message to server 0 of a worker that will join. Reply: FreePlace.

    A scheduler replies Located; the worker then asks server 0.
    """

    fleetlight: str
    torch: str
    #: the stamp of its start; a repeated request gets the same place
    started_at: int


class FreePlace(MessageBase, frozen=True):
    """A free place for a worker, and what its process must know of the job."""

    worker: int
    worker_num: int
    worker_max: int
    server_endpoints: list[tuple[str, int]]
    #: True if the servers announce themselves at the rendezvous, since they may move
    announces: bool = False
    #: the folder of the job's checkpoints; "" if it saves nothing
    checkpoint: str = ""
    job: str = ""


class PreludeRequest(MessageBase, frozen=True):
    """Request the results of all barriers before the first lease. Reply: Prelude.

    The reply is Done until a worker has requested a lease, and the worker then asks again; it is
    Admitted if the job has ended.
    """

    repeatable: ClassVar[bool] = True


class Prelude(MessageBase, frozen=True):
    """Barriers in their order. Arrays: those of all workers of the first barrier, then the next."""

    operations: list[str]
    #: by barrier: the number of its arrays
    counts: list[int]


class Admit(MessageBase, frozen=True):
    """Request to join at the start of a pass over a loader. Reply: Admitted.

    The reply is Done while there is no such start; the worker then asks again.
    """

    repeatable: ClassVar[bool] = True
    loader: int


class Admitted(MessageBase, frozen=True):
    """The pass that the worker may join. Arrays: the state of worker 0, as bytes."""

    turn: int
    #: True when the job has ended: there is no pass any more
    is_over: bool = False


class Held(MessageBase, frozen=True):
    """The reply to LeaseRequest while workers join at the start of its pass; ask again."""

    #: the worker sends its state first
    wants_state: bool = False


class OfferState(MessageBase, frozen=True):
    """The state that workers take which join at this pass. Arrays: bytes. Reply: Done."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int


class Enter(MessageBase, frozen=True):
    """The worker takes part from this phase on. Reply: Entered.

    Server 0 is the first to get it, and holds the pass until it gets EnteredAll.
    """

    repeatable: ClassVar[bool] = True
    phase: int
    loader: int
    turn: int


class Entered(MessageBase, frozen=True):
    """Whether the worker takes part; if not, it asks again to be admitted."""

    is_member: bool


class EnteredAll(MessageBase, frozen=True):
    """All servers count the worker. Reply: Done."""

    repeatable: ClassVar[bool] = True
