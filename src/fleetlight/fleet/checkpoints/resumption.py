# SPDX-License-Identifier: Apache-2.0
"""`Resumption`: a start of a job goes on from the checkpoint that an earlier one has left.

It is taken up in pieces, each when the script needs it: a loader's position when the loader is
made, values before the first batch or forward, random numbers where they had been.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# not `from fleetlight import`, which asks for the API, and that may be being imported
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import WorkerState
from fleetlight.data.loader import ShardLoader
from fleetlight.errors import CheckpointError
from fleetlight.fleet.checkpoints.loading import load_job
from fleetlight.fleet.job import Job
from fleetlight.observe.log import logger

_OPERATION = "looking for a checkpoint"


class Resumption:
    """What is still to be taken up."""

    def __init__(self, folder: str, via: str, zero: WorkerState) -> None:
        self._folder, self._via = folder, via
        self._positions = list(zero.values.get("loaders", []))
        #: between two batches of which loader the job had been
        self._between: int | None = zero.values.get("between")
        self._random: list[Callable[[], None]] = []
        self._is_taken_up = False

    def place(self, loader: ShardLoader[Any], number: int) -> None:
        """Bring the loader that is made as the `number`th to where it was."""
        if number < len(self._positions):
            loader.load_state_dict(self._positions[number])
        else:
            logger.warning(
                "the checkpoint knows the positions of %d loaders; loader %d of this job begins "
                "with its first record",
                len(self._positions),
                number,
            )

    def take_up(self, job: Job) -> bool:
        """Load all values, and all workers come here; False when that was done before."""
        if self._is_taken_up:
            return False
        self._is_taken_up = True
        load_job(job, self._folder, self._via, random_later=self._random)
        if self._between is None:
            self._take_up_random()
        if not job.replay.is_catching_up:
            logger.info("going on from %s, saved at step %d", self._folder, job.step)
        return True

    def between(self, number: int) -> None:
        """The script is between two batches of a loader; values are there."""
        if number == self._between:
            self._take_up_random()

    def _take_up_random(self) -> None:
        for step in self._random:
            step()
        self._random.clear()


def resumption_of(job: Job, folder: str, via: str) -> Resumption | None:
    """Find out whether this start goes on from what is in the folder. All workers come here.

    What worker 0 sees there counts: others may not see the folder.
    """
    found: list[bytes] = []

    def look() -> None:
        zero = _found(job, folder)
        found.append(b"" if zero is None else zero.to_bytes())

    group = job.group
    group.together(look if group.index == 0 else None, _OPERATION)
    told = group.broadcast_bytes(found[0] if found else b"", _OPERATION)
    return Resumption(folder, via, WorkerState.from_bytes(told)) if told else None


def _found(job: Job, folder: str) -> WorkerState | None:
    """The record of worker 0 in the checkpoint to go on from; None: this job begins anew."""
    role, configs = job.role, job.strategy.checkpoint_configs
    asked, again = configs.resume or role.resume, role.restart > 0
    if not (Path(folder) / checkpoint.MANIFEST).exists():
        if asked and not again and not job.begins:
            raise CheckpointError(
                f"{folder}: there is no checkpoint to go on from; begin anew without --resume "
                "(FLEET_RESUME, resume in strategy.checkpoint_configs), or name the folder of one"
            )
        return None
    saved = checkpoint.read(folder)
    if not asked and not again:
        raise CheckpointError(
            f"{folder} holds the checkpoint of an earlier job (step {saved.manifest.step}, "
            f"{saved.manifest.created:%Y-%m-%d %H:%M} UTC), which this one would replace; go on "
            "from it with fleetrun --resume (FLEET_RESUME=1), or name another folder"
        )
    zero = saved.worker(0)
    return WorkerState(rank=0) if zero is None else zero
