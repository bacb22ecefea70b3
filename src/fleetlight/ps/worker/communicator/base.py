# SPDX-License-Identifier: Apache-2.0
"""What all communicators do alike: count steps, read rows, take dense values that have arrived."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from fleetlight.errors import ConfigError
from fleetlight.kernels import Deduped, dedup
from fleetlight.ps.update import Floats, Ids, Update
from fleetlight.ps.worker.client import Client, ReplyValues, Wanted
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.prefetcher import Prefetcher
from fleetlight.ps.worker.replay.commit_log import ResumePoint


class Communicator:
    """When a worker pulls and pushes. Any thread may look rows up; one trains, and calls the rest.

    A phase lasts from one barrier to the next; steps are counted in it, because only those are
    comparable between workers whose data end at different times.
    """

    def __init__(self, client: Client, live: LocalParameters) -> None:
        self.client = client
        self.plan = client.plan
        self.live = live
        self.phase = 0
        #: steps made since the phase began
        self.steps = 0
        #: steps of all phases before this one
        self._before = 0
        #: steps given to this communicator, and how many of them the servers have acknowledged
        self.made = self.acknowledged = 0
        #: `version` of each server's values in use
        self.versions = [0] * client.server_num
        #: rows of the batch to come; None where the worker has rows of its own
        self.ahead: Prefetcher | None = None
        #: told which ids a layer reads rows of, as they are in the caller's tensor
        self.reached: Callable[[int, Ids], None] | None = None

    def go_on(self) -> bool:
        """Stand where an earlier life of this worker stood, if there was one.

        False when its last step was skipped by all for an infinity.
        """
        moment = self.client.moment
        if moment is not None:
            self.phase, self.steps, self._before = moment.phase, moment.steps, moment.before
        return self.client.bring_again()

    def counted(self, moment: ResumePoint | None, more: int = 0) -> ResumePoint | None:
        """The moment, with what is counted here; so many steps are about to be counted."""
        if moment is None:
            return None
        return msgspec.structs.replace(
            moment, phase=self.phase, steps=self.steps + more, before=self._before
        )

    def start(self) -> None:
        """Begin, once the first values are on the servers: take the dense ones."""
        self.take_dense()

    def refresh(self) -> None:
        """Put values that have arrived meanwhile into place."""

    def announce(self, ids: Mapping[int, Ids]) -> None:
        """The ids of each table in the batch that comes after the one handed out now."""
        if self.ahead is not None:
            at_least = self.at_least()
            self.ahead.announce(ids, at_least=at_least, phase=self.phase, step=self.steps)

    def look_up(self, table: int, ids: Ids, insert: bool) -> tuple[Deduped, Floats]:
        """The distinct ids and their rows."""
        found = None if self.ahead is None else self.ahead.whole(table, ids, self.at_least())
        if found is not None:
            return found
        wanted = dedup(ids, self.client.server_num)
        return wanted, self.pull(table, wanted, insert)

    def pull(self, table: int, wanted: Deduped, insert: bool) -> Floats:
        """The rows of distinct ids."""

        def fetch(missing: Deduped) -> Floats:
            return self.fetch([Wanted(table, missing, insert)])[0]

        if self.ahead is None:
            return fetch(wanted)
        return self.ahead.read(table, wanted, fetch, self.at_least())

    def fetch(self, wanted: Sequence[Wanted]) -> list[Floats]:
        """Rows from the servers."""
        # the phase first: steps may be counted anew meanwhile, by the thread that trains
        phase = self.phase
        values = self.client.pull(wanted, at_least=self.at_least(), phase=phase, step=self.steps)
        if any(one.insert for one in wanted):
            # gradients are made of no others
            self.note(values)
        return values.rows

    def at_least(self) -> int:
        """How many steps of every worker the values read now must include."""
        return 0

    def step(self, update: Update, moment: ResumePoint | None = None) -> bool:
        """Bring the gradients of a step; False when it was skipped by all for an infinity.

        `moment` is where a later life of this worker may go on.
        """
        raise NotImplementedError

    def clip(self, updates: Sequence[Update], max_norm: float, norm_type: float) -> float:
        """The norm of the gradients of this worker; scales them to at most `max_norm`."""
        total = norm_of(updates, norm_type)
        # a norm that is not finite is dealt with by the step, which knows whether it is skipped
        factor = clip_factor(total, max_norm) if math.isfinite(total) else 1.0
        if factor < 1:
            for update in updates:
                scale(update, factor)
        return total

    def flush(self) -> None:
        """Wait until everything this worker has brought is applied."""

    def settle(self) -> None:
        """What comes before a barrier: nothing of this worker is on its way any more."""
        self.flush()
        self.client.end_phase(self.phase)

    def resume(self) -> None:
        """What comes after a barrier: the servers' values, which are the same for all workers."""
        self._before += self.steps
        self.steps = 0
        self.phase += 1
        self.reopen()

    def reopen(self) -> None:
        """What comes after `settle` where the phase goes on after all: the servers' values."""
        # others may have gone on while this worker waited
        self.forget_ahead()
        self.take_dense()

    def stop(self) -> None:
        """The last words of a good run: everything is applied when it returns."""
        self.flush()
        if self.ahead is not None:
            self.ahead.stop()

    def forget_ahead(self) -> None:
        """Rows on the servers may have changed without a push of this worker."""
        if self.ahead is not None:
            self.ahead.forget()

    def take_dense(self) -> None:
        """The servers' dense values, now."""
        if self.plan.serves_dense and self.plan.dense:
            values = self.client.pull([], dense=True, phase=self.phase, step=self.steps)
            self.note(values)
            self.client.unpack(values, self.live)

    def note(self, values: ReplyValues) -> None:
        """Remember how new the values in use are."""
        for server, version in values.versions.items():
            self.versions[server] = version

    def figures(self) -> dict[str, float]:
        """What this worker has counted."""
        ahead = {} if self.ahead is None else self.ahead.figures()
        return {"steps": float(self._before + self.steps), **ahead}


def clip_factor(total: float, max_norm: float) -> float:
    """What gradients are multiplied by, as torch's own clipping does it."""
    return min(1.0, max_norm / (total + 1e-6))


def norm_of(updates: Sequence[Update], norm_type: float) -> float:
    """The norm over the dense gradients and table rows of several updates."""
    arrays = [a for u in updates for a in u.dense.values() if a is not None]
    arrays += [part.gradients for u in updates for part in u.tables.values()]
    if any(array.dtype == np.uint16 for array in arrays):
        raise ConfigError("clip_grad_norm_: bfloat16 parameters on servers cannot be clipped")
    if math.isinf(norm_type):
        return max((float(np.abs(a).max(initial=0)) for a in arrays), default=0.0)
    powers = (float((np.abs(a.astype(np.float64)) ** norm_type).sum()) for a in arrays)
    return float(sum(powers) ** (1 / norm_type))


def scale(update: Update, factor: float) -> None:
    """Multiply the gradients of an update where they are."""
    for array in update.dense.values():
        if array is not None:
            array *= array.dtype.type(factor)
    for part in update.tables.values():
        part.gradients *= np.float32(factor)
