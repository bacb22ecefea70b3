# SPDX-License-Identifier: Apache-2.0
"""Base of all communicators: counts steps, reads rows, copies received dense values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleetlight.errors import ConfigError
from fleetlight.kernels import Deduped, dedup
from fleetlight.observe.telemetry.step_times import PULL, step_times
from fleetlight.ps.layers.handle import Asked
from fleetlight.ps.update import Floats, Ids, Update
from fleetlight.ps.worker.cached_rows import CachedRows
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.joint_reads import Read, read_together
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.lookahead.lookahead import Lookahead
from fleetlight.ps.worker.replay.commit_log import Committed
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.reply_values import ReplyValues, Wanted


class Communicator:
    """Decides when a worker pulls and pushes. Any thread may look up rows; one thread trains.

    A phase lasts from one barrier to the next. Steps are counted within a phase, because only
    those are comparable between workers whose data end at different times.
    """

    def __init__(self, client: Client, live: LocalParameters) -> None:
        self.client = client
        self.plan = client.plan
        self.live = live
        self.phase = 0
        #: steps in this phase
        self.steps = 0
        #: steps of all phases before this one
        self._before = 0
        #: steps of this communicator, and how many of them the servers have acknowledged
        self.made = self.acknowledged = 0
        #: `version` of each server's values in use
        self.versions = [0] * client.server_num
        #: reads the rows of coming batches; None for a worker with local rows
        self.lookahead: Lookahead | None = None
        #: the rows of some tables on the device of their layers, if a layer asks for that
        self.cached: CachedRows | None = None
        #: called with the ids of a lookup, as they are in the caller's tensor
        self.reached: Callable[[int, Ids], None] | None = None

    def repeat(self, last: Committed) -> bool:
        """Repeat the last logged step of a restarted worker; False if all workers skipped it."""
        point = last.commit.resume_point
        self.phase, self.steps, self._before = point.phase, point.steps, point.before
        return self.client.repeat(last)

    def origin(self, update: Update, more: int = 0) -> StepOrigin:
        """The position of a step; `more` steps are not counted yet."""
        return StepOrigin(self.phase, self.steps + more, self._before, update.resume_point)

    def start(self) -> None:
        """Start, once the first values are on the servers: pull the dense ones."""
        self.pull_dense()

    def refresh(self) -> None:
        """Copy received values into the parameters."""

    def announce(self, coming: Sequence[Mapping[int, Ids]]) -> None:
        """Announce the batches after the one handed out now: the ids of each table."""
        if self.lookahead is not None:
            at_least = self.at_least()
            self.lookahead.announce(coming, at_least=at_least, phase=self.phase, step=self.steps)

    def look_up(self, asked: Sequence[Asked]) -> list[tuple[Deduped, Floats]]:
        """Return the distinct ids and their rows, by table, with one request to each server."""
        with step_times.part(PULL):
            return self._look_up(asked)

    def _look_up(self, asked: Sequence[Asked]) -> list[tuple[Deduped, Floats]]:
        found = [self.read_ahead(one) for one in asked]
        wanted = [
            Wanted(one.table, dedup(one.ids, self.client.server_num), one.insert)
            for one, known in zip(asked, found, strict=True)
            if known is None
        ]
        if not wanted:
            return [one for one in found if one is not None]
        pulled = zip((one.ids for one in wanted), self.pull(wanted), strict=True)
        return [next(pulled) if one is None else one for one in found]

    def read_ahead(self, asked: Asked) -> tuple[Deduped, Floats] | None:
        """The rows of a table whose ids are exactly those announced."""
        if self.lookahead is None:
            return None
        return self.lookahead.whole(asked.table, asked.ids, self.at_least())

    def pull(self, wanted: Sequence[Wanted]) -> list[Floats]:
        """Return the rows of distinct ids, by table, with one request to each server."""
        return read_together(wanted, self.read, self.fetch)

    def read(self, wanted: Wanted) -> Read:
        """Read rows of one table: those read ahead, and those that are fetched now."""
        assert self.lookahead is not None
        return self.lookahead.read(wanted.table, wanted.ids, self.at_least())

    def fetch(self, wanted: Sequence[Wanted]) -> list[Floats]:
        """Pull rows from the servers."""
        return self.pull_now(wanted).rows

    def pull_now(self, wanted: Sequence[Wanted]) -> ReplyValues:
        """The reply to a pull of rows."""
        # read the phase first: the training thread may reset the steps meanwhile
        phase = self.phase
        with step_times.part(PULL):
            values = self.client.pull(
                wanted, at_least=self.at_least(), phase=phase, step=self.steps
            )
        if any(one.insert for one in wanted):
            # only these rows receive gradients
            self.note(values)
        return values

    def at_least(self) -> int:
        """The number of steps of every worker that values read now must include."""
        return 0

    def step(self, update: Update) -> bool:
        """Push the gradients of a step; False when all workers skipped it for an infinity."""
        raise NotImplementedError

    def clip(self, updates: Sequence[Update], max_norm: float, norm_type: float) -> float:
        """Scale the gradients of this worker to at most `max_norm`; return their norm."""
        total = norm_of(updates, norm_type)
        # the step handles a norm that is not finite, since it knows whether it is skipped
        factor = clip_factor(total, max_norm) if math.isfinite(total) else 1.0
        if factor < 1:
            for update in updates:
                scale(update, factor)
        return total

    def flush(self) -> None:
        """Wait until the servers have applied all pushes of this worker."""

    def settle(self) -> None:
        """Prepare for a barrier: complete all pushes and end the phase."""
        self.flush()
        if self.cached is not None:
            # from now on others may step without this worker
            self.cached.forget(until_next=True)
        self.client.end_phase(self.phase)

    def resume(self) -> None:
        """Start the next phase after a barrier, with the servers' values."""
        self._before += self.steps
        self.steps = 0
        self.phase += 1
        self.reopen()

    def reopen(self) -> None:
        """Continue the phase after `settle`, with the servers' values."""
        # other workers may have pushed meanwhile
        self.drop_prefetched()
        self.pull_dense()

    def enter(self, phase: int) -> None:
        """Take part in a running job from this phase on, with the servers' values."""
        self.phase = phase - 1
        self.resume()

    def stop(self) -> None:
        """Stop after a successful run, once the servers have applied all pushes."""
        self.flush()
        if self.lookahead is not None:
            self.lookahead.stop()

    def drop_prefetched(self) -> None:
        """Drop rows kept here: they may have changed without a push of this worker."""
        if self.lookahead is not None:
            self.lookahead.forget()
        if self.cached is not None:
            self.cached.forget()

    def pull_dense(self) -> None:
        """Pull the servers' dense values."""
        if self.plan.serves_dense and self.plan.dense:
            values = self.client.pull([], dense=True, phase=self.phase, step=self.steps)
            self.note(values)
            self.client.unpack(values, self.live)

    def note(self, values: ReplyValues) -> None:
        """Record the versions of values in use."""
        for server, version in values.versions.items():
            self.versions[server] = version

    @property
    def queued_pushes(self) -> int:
        """Pushes in flight, or in a queue."""
        return 0

    def metrics(self) -> dict[str, float]:
        """Counters of this worker."""
        prefetched = {} if self.lookahead is None else self.lookahead.metrics()
        cached = {} if self.cached is None else self.cached.metrics()
        return {"steps": float(self._before + self.steps), **prefetched, **cached}


def clip_factor(total: float, max_norm: float) -> float:
    """The factor that gradients are multiplied by, as in torch's own clipping."""
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
    """Scale the gradients of an update in place."""
    for array in update.dense.values():
        if array is not None:
            array *= array.dtype.type(factor)
    for part in update.tables.values():
        part.gradients *= np.float32(factor)
