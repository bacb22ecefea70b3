# SPDX-License-Identifier: Apache-2.0
"""What workers do together, and that they are there."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.ps.calls import NONE, Call
from fleetlight.ps.messages.base import Words


class Meet(Words, frozen=True):
    """Wait for all workers at server 0. Arrays: bytes of this worker. Answer: Met."""

    repeatable: ClassVar[bool] = True
    meeting: int
    operation: str
    deadline_s: float


class Met(Words, frozen=True):
    """Arrays: the bytes of every worker, in their order."""


class Leave(Words, frozen=True):
    """Goodbye; `error` is set when it is a bad end. Answer: Done."""

    repeatable: ClassVar[bool] = True
    error: str = ""
    #: the worker has stopped because the job was asked to
    stopped: bool = False


class Heard(Words, frozen=True):
    """The worker knows that all servers have heard its goodbye, and calls no more. Answer: Done."""


class Beat(Words, frozen=True):
    """A sign of life, and what the worker calls for. Answer: Beaten."""

    repeatable: ClassVar[bool] = True
    step: int
    call: Call = NONE
    #: it stops, and comes to no meeting any more
    stops: bool = False


class Beaten(Words, frozen=True):
    """What has been called for, and how many workers have not left."""

    call: Call = NONE
    here: int = 0
