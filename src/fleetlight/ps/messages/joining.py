# SPDX-License-Identifier: Apache-2.0
"""How a worker joins a server."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.ps.messages.base import MessageBase
from fleetlight.ps.plan import Plan
from fleetlight.ps.resume import Decision, Remains, Report


class Greeting(MessageBase, frozen=True, tag="Hello"):
    """The first words on a connection. Answer: Welcome."""

    fleetlight: str
    worker: int
    worker_num: int
    server: int
    server_num: int
    #: tells apart workers that have nothing but the index in common
    incarnation: int
    #: control | push | pull
    lane: str
    #: the worker has joined before: it is answered once the server has taken up its values again
    joined: bool = False
    #: how often the worker has been started and has gone on where it was
    life: int = 1
    #: how long it may be away, should it be started again
    away_s: float = 0.0
    #: the last push that this server has acknowledged to this worker; 0 where servers may lose some
    acknowledged: int = 0


class Welcome(MessageBase, frozen=True):
    """The server takes the worker in, or into its plan."""

    server: int
    #: counts the loads of checkpoints; pushes of an older epoch are refused
    epoch: int
    #: how often the server has been started on the same values; 0: it does not know yet
    life: int = 1
    #: what an earlier launch has left in its folder, where the whole job resumes
    remains: Remains | None = None


class Resume(MessageBase, frozen=True):
    """What a worker knows of an earlier launch; waits for those of all workers. Answer: Resumed.

    Or Done, while a server that goes on with its workers is not open: then the worker asks again.
    """

    repeatable: ClassVar[bool] = True
    report: Report
    #: False in the process that has the server: it opens later
    waits: bool = True


class Resumed(MessageBase, frozen=True):
    """What all processes do."""

    decision: Decision
    #: the number of the last push that the server has of the worker
    mark: int = 0
    #: of its pushes, how many wait until the norm of their gradients is known
    held: int = 0
    #: the others went on without this worker
    was_lost: bool = False


class Join(MessageBase, frozen=True):
    """The worker's plan, once it is known; waits until the server's is too. Answer: Welcome.

    Or Done, while the server reads a checkpoint: then the worker asks again.
    """

    repeatable: ClassVar[bool] = True
    plan: Plan
