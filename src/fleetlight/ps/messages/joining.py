# SPDX-License-Identifier: Apache-2.0
"""Messages by which a worker joins a server."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from fleetlight.ps.messages.base import MessageBase
from fleetlight.ps.plan import Plan
from fleetlight.ps.resume import Decision, Remains, Report


class Greeting(MessageBase, frozen=True):
    """The first message on a connection. Reply: Welcome."""

    fleetlight: str
    worker: int
    worker_num: int
    server: int
    server_num: int
    #: the stamp of its first start: distinguishes unrelated processes with the same worker index
    started_at: int
    #: control | push | pull
    lane: str
    #: the worker has joined before: the server replies once it has restored its values
    joined: bool = False
    #: number of times that the worker was started; a restarted worker resumes at its last step
    incarnation: int = 1
    #: how long the worker may be absent during a restart
    away_s: float = 0.0
    #: the last push that this server acknowledged to this worker; 0 when servers may lose pushes
    acknowledged: int = 0
    #: the worker joins a job that is running
    joins: bool = False
    #: how many workers the job may have while it runs; None: it keeps its workers
    worker_max: int | None = None


class Welcome(MessageBase, frozen=True):
    """The server admits the worker, or confirms its plan."""

    server: int
    #: number of loaded checkpoints; pushes of an older epoch are refused
    epoch: int
    #: number of times that the server was started on the same values; 0: not known yet
    incarnation: int = 1
    #: the state of the server's folder, when the whole job resumes
    remains: Remains | None = None


class ShareMemory(MessageBase, frozen=True):
    """Offer memory of this host for the bodies of the connection's frames. Reply: Done."""

    #: where the descriptor waits (`wire/shared_memory.py`), and what its receiver must know
    name: str
    ticket: bytes
    slot_bytes: Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 30)]


class Resume(MessageBase, frozen=True):
    """Report the worker's folder and wait for the reports of all workers. Reply: Resumed.

    The reply is Done while a server that resumes is not open yet; the worker then asks again.
    """

    repeatable: ClassVar[bool] = True
    report: Report
    #: False in a process with an embedded server, which opens later
    waits: bool = True


class Resumed(MessageBase, frozen=True):
    """The decision for all processes."""

    decision: Decision
    #: the last push of the worker that the server applied
    mark: int = 0
    #: how many pushes of the worker wait until the gradient norm is known
    held: int = 0
    #: the other workers continued without this worker
    was_lost: bool = False


class Join(MessageBase, frozen=True):
    """Send the worker's plan; the server replies when it has its own. Reply: Welcome.

    The reply is Done while the server reads a checkpoint; the worker then asks again.
    """

    repeatable: ClassVar[bool] = True
    plan: Plan
