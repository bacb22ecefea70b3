# SPDX-License-Identifier: Apache-2.0
"""`JoinState`: what a worker that joins takes over from worker 0, at the start of a turn.

Rows and dense values are on the servers. All else that a resumed job would have is here: the epoch
and position of each loader, counts of steps, schedulers, scalers, frozen parameters and buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleetlight.checkpoint import WorkerState
from fleetlight.errors import CheckpointError, MembershipError, counted
from fleetlight.fleet.checkpoints.worker_state import load_replayed, saved_values
from fleetlight.fleet.job import Job
from fleetlight.fleet.protocols import Purpose
from fleetlight.fleet.served.elastic.unserved_tensors import UnservedTensors
from fleetlight.fleet.served.session import ServerSession
from fleetlight.observe.log import logger
from fleetlight.torch_compat.tensors import assign

#: a joining worker has positions of its own, and its own random numbers
_LOADERS = "loaders"


@dataclasses.dataclass(frozen=True)
class JoinState:
    """The state of worker 0, between two batches."""

    #: phase of the communicator, barriers so far, and loaded checkpoints
    phase: int
    meetings: int
    epoch: int
    #: by loader: what all workers must have in common, and the position
    loaders: Sequence[Mapping[str, object]]
    positions: Sequence[Mapping[str, Any]]
    worker: WorkerState

    @classmethod
    def of(
        cls, job: Job, session: ServerSession, loader: int, position: Mapping[str, Any]
    ) -> JoinState | None:
        """The state at this position of a loader; None where no worker can join."""
        if any(one.cursor.is_being_read for n, one in enumerate(job.loaders) if n != loader):
            # the script of a worker that joins would not be inside the outer loop
            return None
        try:
            values = saved_values(job, Purpose.REPLAY)
        except CheckpointError as error:
            logger.warning("no worker can join this job: %s", error)
            return None
        positions = [one.cursor.resume_state() for one in job.loaders]
        positions[loader] = {**positions[loader], **position, "broken_off": False}
        values.pop(_LOADERS, None)
        modules = [managed.module for managed in job.models]
        return cls(
            session.communicator.phase,
            session.client.replies.meetings,
            session.client.epoch,
            _settings(job),
            positions,
            WorkerState(
                rank=0,
                values=values,
                tensors=UnservedTensors().tensors(modules, session.bound.dense),
            ),
        )

    def to_bytes(self) -> bytes:
        """Everything in one message."""
        own = {
            "phase": self.phase,
            "meetings": self.meetings,
            "epoch": self.epoch,
            "loaders": list(self.loaders),
        }
        values = {"join": own, _LOADERS: list(self.positions), **self.worker.values}
        return dataclasses.replace(self.worker, values=values).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> JoinState:
        """The state that `to_bytes` was called on."""
        worker = WorkerState.from_bytes(data)
        values = dict(worker.values)
        own, positions = values.pop("join"), values.pop(_LOADERS)
        return cls(
            own["phase"],
            own["meetings"],
            own["epoch"],
            own["loaders"],
            positions,
            dataclasses.replace(worker, values=values),
        )

    def check(self, job: Job, session: ServerSession) -> None:
        """Refuse the state of another script; the servers have compared all else."""
        if len(job.loaders) > len(self.positions):
            raise MembershipError(
                f"this worker joins with {counted(len(job.loaders), 'loader')} of fleet.shard, but "
                f"worker 0 has {len(self.positions)}; run the script that it runs"
            )
        for number, (own, first) in enumerate(zip(_settings(job), self.loaders, strict=False)):
            for name in sorted({*own, *first}):
                if own.get(name) != first.get(name):
                    raise MembershipError(
                        f"sharded loader {number}: this worker has {name} {own.get(name)!r}, "
                        f"worker 0 has {first.get(name)!r}; read the same data set with the same "
                        "settings as the running job"
                    )
        self._check_tensors(job, session)

    def _check_tensors(self, job: Job, session: ServerSession) -> None:
        own = self._own_tensors(job, session)
        theirs = {name: list(tensor.shape) for name, tensor in self.worker.tensors.items()}
        for name in sorted({*own, *theirs}):
            here = list(own[name].shape) if name in own else None
            if theirs.get(name) != here:
                raise MembershipError(
                    f"buffer or frozen parameter {name}: this worker has the shape {here}, worker "
                    f"0 has {theirs.get(name)}; run the script that it runs"
                )

    def _own_tensors(self, job: Job, session: ServerSession) -> dict[str, torch.Tensor]:
        modules = [managed.module for managed in job.models]
        return UnservedTensors().tensors(modules, session.bound.dense)

    def restore(self, job: Job, session: ServerSession) -> None:
        """Give the script of this worker the state; loaders have their positions."""
        load_replayed(job, self.worker.values, but=(_LOADERS,))
        own = self._own_tensors(job, session)
        with torch.no_grad():
            for name, tensor in own.items():
                assign(tensor, self.worker.tensors[name])


def _settings(job: Job) -> list[dict[str, object]]:
    """What all workers have in common; seeds come with the positions."""
    every = (one.settings() for one in job.loaders)
    return [{name: value for name, value in one.items() if name != "seed"} for one in every]
