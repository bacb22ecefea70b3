# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: each worker writes them to the store, and an expired wait names the worker to blame.

No worker reads heartbeats before a wait fails. Then it reads them twice: a worker without a new
heartbeat is silent, and one at an earlier step is late. A heartbeat also has the operation in which
its worker waits, so that an error names workers that wait in different operations.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping

import msgspec

from fleetlight.collective.membership import diagnosis
from fleetlight.collective.membership.diagnosis import (
    Departure,
    WorkerHeartbeat,
    first_sentence,
    name_of,
)
from fleetlight.collective.membership.rendezvous import cloned, store_errors
from fleetlight.errors import RAISE_DEADLINE, DeadlineError, PeerError, PeerLostError
from fleetlight.roles.members import MemberHello
from fleetlight.torch_compat.c10d import Store

BEAT_S = 0.5
#: heartbeats that may be missed before a worker counts as silent
_MISSED = 4
_POLL_S = 0.05
#: hints where a worker left without an error, for a reduction and for any other call
_GRADIENTS_ADVICE = (
    ". If workers have unequal numbers of batches, fleet.shard(loader) evens them out"
)
_CALL_ADVICE = ". Every worker must call it, not only some"
#: how long a worker may be silent before the workers that wait for its work give up
_LOST_S = 30.0


class Liveness:
    """Writes the heartbeats of this worker in a thread, and reads those of the others on demand.

    Make it before the worker introduces itself: worker 0, which keeps the store, may leave as soon
    as it knows all workers, and accepts no connection after that.
    """

    def __init__(self, store: Store, index: int) -> None:
        with store_errors():
            # fails where the store is gone; a new connection would try until the deadline
            store.check(["any"])
            # a connection of its own: the main thread may block the other one in a long wait
            self._store = cloned(store)
            # and one for reads of the main thread, so that a heartbeat never waits for them
            self._asking = cloned(store)
        # In worker 0 this object is the store's server. torch's process group holds it as well, but
        # closes before the last worker reads for the last time.
        self._server_of_store: Store | None = store
        self._formed_at = time.monotonic()
        self._index = index
        self._others: dict[int, MemberHello] = {}
        self._stop = threading.Event()
        self._count = 0
        #: of each worker: the count of its last heartbeat that was read, and when
        self._seen: dict[int, tuple[int, float]] = {}
        self._looked_at = self._formed_at
        self.step = 0
        self._waiting: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to write heartbeats."""
        # not in __init__: the thread keeps this object alive, and with it the connections
        self._thread = threading.Thread(target=self._run, name="fleet-liveness", daemon=True)
        with store_errors():
            self._beat()
        self._thread.start()

    def set_workers(self, hellos: Mapping[int, MemberHello]) -> Liveness:
        """Set the other workers, and let the clock count from now.

        All workers call this at about the same moment, so their clocks agree.
        """
        self._formed_at = time.monotonic()
        self._others = {i: hello for i, hello in hellos.items() if i != self._index}
        return self

    @property
    def _now(self) -> float:
        """Seconds since the group was formed, by a monotonic clock."""
        return time.monotonic() - self._formed_at

    def depart(self, error: str | None) -> None:
        """Stop the heartbeats and write how this worker ended."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=2 * BEAT_S)
        gone = Departure(self.step, self._now, error)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"gone/{self._index}", msgspec.json.encode(gone).decode())

    def release_store(self) -> None:
        """Write this worker's last key; worker 0 may close the store when it has those of all."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._index}", "")
        self._server_of_store = None

    def all_left(self) -> bool:
        """True when no other worker will use the store again."""
        return all(self._asking.check([f"left/{i}"]) for i in self._others)

    def all_gone(self) -> bool:
        """True when every other worker has departed."""
        return len(self._departures()) == len(self._others)

    def any_alive(self, silence_s: float) -> bool:
        """True when a worker that has not departed sent a heartbeat lately; takes a moment."""
        silences = self._silences(set(self._others) - set(self._departures()))
        time.sleep(_POLL_S)
        return any(silence < silence_s for silence in silences.values())

    def _silences(self, workers: Collection[int]) -> dict[int, float]:
        """The seconds since the last heartbeat of each worker that this one has read.

        Two looks count as at most two heartbeats apart: the others may have been suspended when
        this worker was, with their machine.
        """
        now, beats = time.monotonic(), self._beats()
        uncounted = max(0.0, now - self._looked_at - 2 * BEAT_S)
        self._looked_at = now
        for index, beat in beats.items():
            count, since = self._seen.get(index, (-1, now))
            self._seen[index] = (beat.count, now if count != beat.count else since + uncounted)
        return {i: now - self._seen[i][1] if i in beats else math.inf for i in workers}

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Heartbeats during the block say that this worker waits in `operation`."""
        outer, self._waiting = self._waiting, operation
        try:
            yield
        finally:
            self._waiting = outer

    def barrier(
        self, name: str, operation: str, deadline_s: float, *, working: bool = False
    ) -> None:
        """Wait until every worker has reached a barrier; the error names the absent ones.

        `working` says that the others are busy with work of unknown length, such as writing
        files: only their silence ends the wait.
        """
        with store_errors(), self.waiting(operation):
            self._asking.set(f"meet/{name}/{self._index}", "here")
            absent = self._absent_after(name, deadline_s, working)
            if absent:
                raise self._missed(absent, operation, deadline_s, working)

    def _absent_after(self, name: str, deadline_s: float, working: bool) -> list[int]:
        """Wait for all workers; returns those that are absent at the end of the wait."""
        absent, pause = list(self._others), 0.001
        end = time.monotonic() + (BEAT_S if working else deadline_s)
        lost_s = max(min(deadline_s, _LOST_S), BEAT_S * _MISSED)
        while True:
            absent = [i for i in absent if not self._asking.check([f"meet/{name}/{i}"])]
            if not absent or any(self._asking.check([f"gone/{i}"]) for i in absent):
                return absent
            if time.monotonic() > end:
                if not working or max(self._silences(absent).values()) > lost_s:
                    return absent
                end += BEAT_S
            time.sleep(pause)
            # a short wait ends early, and a long one causes little load on the store
            pause = min(2 * pause, _POLL_S)

    def _missed(
        self, absent: Collection[int], operation: str, deadline_s: float, working: bool
    ) -> PeerError:
        """The error where workers did not reach a barrier."""
        gone = {i: end for i, end in self._departures().items() if i in absent}
        failed = [f"{self._name(i)} failed: {end.error}" for i, end in gone.items() if end.error]
        if failed:
            return PeerLostError(f"{operation}: {', '.join(failed)}")
        if gone:
            names = ", ".join(self._name(i) for i in gone)
            return PeerLostError(f"{operation}: {names} left the job without calling it")
        health = self._health(absent)
        if working:
            return PeerLostError(f"{operation}: gave up waiting, {health}")
        return DeadlineError(
            f"{operation}: every worker must call it, but within {deadline_s:g} s some did not: "
            f"{health}; {RAISE_DEADLINE}"
        )

    def _health(self, workers: Collection[int]) -> str:
        before = self._beats()
        time.sleep(BEAT_S * _MISSED)
        after, now = self._beats(), self._now
        return ", ".join(
            f"{self._name(i)} {diagnosis.health_of(before.get(i), after.get(i), now)}"
            for i in workers
        )

    def _name(self, index: int) -> str:
        return name_of(index, self._others[index])

    def explain(self, error: BaseException, operation: str) -> PeerError:
        """The error to raise in place of a failed or expired collective."""
        late = _is_deadline(error)
        with self.waiting(operation):
            suspects, all_alive = self._suspects(operation)
        text = f"{operation} at step {self.step} {'timed out' if late else 'failed'}: "
        text += "; ".join(suspects)
        if any("left after step" in s for s in suspects):
            text += _GRADIENTS_ADVICE if "gradients" in operation else _CALL_ADVICE
        elif late and all_alive:
            text += f"; {RAISE_DEADLINE}"
        return (DeadlineError if late else PeerLostError)(f"{text} [{first_sentence(error)}]")

    def _suspects(self, operation: str) -> tuple[list[str], bool]:
        """Sentences about the cause, and whether all workers send heartbeats."""
        try:
            before, gone = self._beats(), self._departures()
            if gone:
                # a worker that has departed is the cause, and the others may be leaving as well
                before = {}
            else:
                time.sleep(BEAT_S * _MISSED)
                gone = self._departures()
            after = self._beats()
        except RuntimeError:
            keeper = self._others.get(0)
            where = f" ({keeper.where()})" if keeper else ""
            return [
                f"worker 0{where}, which serves the job's rendezvous store, does not reply"
            ], False
        me = WorkerHeartbeat(self._count, self.step, self._now)
        found = diagnosis.diagnose(me, before, after, gone, self._others, self._now)
        alive = not gone and all(
            i in after and not diagnosis.is_silent(before.get(i), after[i]) for i in self._others
        )
        return found or [diagnosis.describe_waits(operation, after, self._others)], alive

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._beat()
            except RuntimeError:
                return  # the store is gone; the next collective fails and says so

    def _beat(self) -> None:
        self._count += 1
        beat = WorkerHeartbeat(self._count, self.step, self._now, self._waiting)
        self._store.set(f"beat/{self._index}", msgspec.json.encode(beat).decode())

    def _beats(self) -> dict[int, WorkerHeartbeat]:
        return {i: msgspec.json.decode(v, type=WorkerHeartbeat) for i, v in self._read("beat")}

    def _departures(self) -> dict[int, Departure]:
        return {i: msgspec.json.decode(v, type=Departure) for i, v in self._read("gone")}

    def _read(self, what: str) -> list[tuple[int, bytes]]:
        there = [i for i in self._others if self._asking.check([f"{what}/{i}"])]
        return [(i, self._asking.get(f"{what}/{i}")) for i in there]


def _is_deadline(error: BaseException) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
