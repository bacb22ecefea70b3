# SPDX-License-Identifier: Apache-2.0
"""The protocols by which the parts of `fleet` know a job. Imports nothing of `fleet`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fleetlight.collective.membership import Hello


class Peers(Protocol):
    """The workers of the job and what they do together; every wait has a deadline.

    `collective.group.Group` is among themselves, `ps.worker.crew.Crew` by way of the servers.
    """

    index: int
    size: int
    deadline_s: float
    device: torch.device
    backend: str
    #: by worker: how it introduced itself; empty where workers meet through servers
    hellos: Mapping[int, Hello]

    @property
    def alone(self) -> bool:
        """True when there is nobody to talk to."""

    def tell_step(self, step: int) -> None:
        """This worker has made its `step`th step: signs of life and errors say so."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce a tensor over all workers, in place: sum, max or min."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, in the order of the workers; alike in type and shape."""

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Worker 0's values, in place, on all workers."""

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        """Everybody's bytes, in the order of the workers, on all workers."""

    def bytes_to_first(self, data: bytes, operation: str) -> list[bytes]:
        """Everybody's bytes, in the order of the workers, on worker 0; none on the others."""

    def broadcast_bytes(self, data: bytes, operation: str) -> bytes:
        """Worker 0's bytes, on all workers."""

    def assemble(self, operation: str) -> None:
        """Wait until every worker has called `operation`, and name who has not."""

    def barrier(self, operation: str = "barrier") -> None:
        """Wait until all workers are here."""

    def together(self, action: Callable[[], None] | None, operation: str) -> None:
        """Do something that may fail on some workers; a failure is an error on all of them."""

    def leave(self) -> None:
        """After a good run: say goodbye."""

    def fail(self, error: str, *, consequence: bool = False) -> None:
        """After a bad run: tell the others why."""


class Purpose(enum.Enum):
    """Why the state of a worker is kept."""

    #: any number of workers may load it
    CHECKPOINT = enum.auto()
    #: the job resumes by itself from the checkpoint in its folder
    RESUME = enum.auto()
    #: this worker alone goes back to its last step, after it was killed
    REPLAY = enum.auto()


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """What was kept of one part, and why."""

    purpose: Purpose
    #: the step of the job
    step: int
    #: by worker 0, for what all workers have alike; None: nothing
    first: Any
    #: by this worker; None where the checkpoint is of fewer workers
    own: Any
    #: by every worker
    each: Sequence[Any]


class Stateful(Protocol):
    """One part of a worker's state. `fleet.worker_state.PARTS` lists all of them."""

    #: its key in the record of a worker
    name: ClassVar[str]
    #: why it is kept
    purposes: ClassVar[Collection[Purpose]]

    def save(self) -> Any:
        """The value now: plain data, tensors may be inside; None: nothing is kept."""

    def load(self, saved: SavedPart) -> None:
        """Continue where the value was saved."""
