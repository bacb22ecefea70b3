# SPDX-License-Identifier: Apache-2.0
"""`Resumption`: a job continues from the checkpoint of an earlier start.

It is loaded in parts: the position of a loader when the script makes it, values before the first
batch or forward, and random numbers at the place of the save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import WorkerState
from fleetlight.data.loader import ShardLoader
from fleetlight.errors import CheckpointError
from fleetlight.fleet.checkpoints.loading import load_job
from fleetlight.fleet.checkpoints.worker_state import positions_of_all
from fleetlight.fleet.job import Job
from fleetlight.fleet.recording.process_metrics import note
from fleetlight.observe.log import logger

_OPERATION = "looking for a checkpoint"


class Resumption:
    """The parts of a checkpoint that are still to be loaded."""

    def __init__(self, folder: str, via: str, zero: WorkerState) -> None:
        self._folder, self._via = folder, via
        self._positions = list(zero.values.get("loaders", []))
        #: the number of the loader between whose batches the job was saved
        self._between: int | None = zero.values.get("between")
        self._random: list[Callable[[], None]] = []
        self._is_resumed = False

    def position_loader(self, loader: ShardLoader[Any], number: int) -> None:
        """Set the position of a new loader, the `number`th."""
        if number < len(self._positions):
            loader.load_state_dict(self._positions[number])
        else:
            logger.warning(
                "the checkpoint has the positions of %d loaders; loader %d of this job begins at "
                "its first record",
                len(self._positions),
                number,
            )

    def resume(self, job: Job) -> bool:
        """Load all values, on every worker; returns False when that was done before."""
        if self._is_resumed:
            return False
        self._is_resumed = True
        load_job(job, self._folder, self._via, random_later=self._random)
        if self._between is None:
            self._restore_random()
        if not job.replay.is_catching_up:
            logger.info("resuming from %s, saved at step %d", self._folder, job.step)
            text = f"resumed from {self._folder}, saved at step {job.step}"
            note(job.role, "resume", text, job.step)
        return True

    def between(self, number: int) -> None:
        """Restore random numbers if the job was saved between two batches of this loader."""
        if number == self._between:
            self._restore_random()

    def _restore_random(self) -> None:
        for step in self._random:
            step()
        self._random.clear()


def resumption_of(job: Job, folder: str, via: str) -> Resumption | None:
    """The checkpoint in the folder that this start continues from; every worker calls it.

    Worker 0 decides: the others may not see the folder.
    """
    found: list[bytes] = []

    def look() -> None:
        zero = _found(job, folder)
        found.append(b"" if zero is None else zero.to_bytes())

    group = job.group
    group.together(look if group.index == 0 else None, _OPERATION)
    sent = group.broadcast_bytes(found[0] if found else b"", _OPERATION)
    return Resumption(folder, via, WorkerState.from_bytes(sent)) if sent else None


def _found(job: Job, folder: str) -> WorkerState | None:
    """The record of worker 0 in the checkpoint to resume from; None: there is none."""
    role, configs = job.role, job.strategy.checkpoint_configs
    asked, again = configs.resume or role.resume, role.restart > 0
    must = configs.resume or role.must_resume
    if not checkpoint.exists(folder):
        if must and not again and not job.is_untrained:
            raise CheckpointError(
                f"{folder}: there is no checkpoint to resume from; start from the beginning "
                "without --resume (FLEET_RESUME, resume in strategy.checkpoint_configs), or name "
                "the folder of a checkpoint"
            )
        return None
    saved = checkpoint.read(folder)
    if not asked and not again:
        raise CheckpointError(
            f"{folder} holds the checkpoint of an earlier job (step {saved.manifest.step}, "
            f"{saved.manifest.created:%Y-%m-%d %H:%M} UTC), which this one would replace; resume "
            "from it with fleetrun --resume (FLEET_RESUME=1), or name another folder"
        )
    zero = saved.worker(0)
    if zero is None:
        return WorkerState(rank=0)
    if any("of" in position for position in zero.values.get("loaders", ())):
        records = [saved.worker(rank) for rank in range(saved.manifest.workers)]
        each = [None if one is None else one.values.get("loaders") for one in records]
        values = {**zero.values, "loaders": positions_of_all(each)}
        return dataclasses.replace(zero, values=values)
    return zero
