# SPDX-License-Identifier: Apache-2.0
"""Signs of life: each worker writes a beat to the store, and an expired wait names who is late.

Nobody reads beats while all goes well. When a wait fails, the beats are read twice; whoever did
not beat in between is silent, whoever has an earlier step is behind. A beat also tells in which
operation its worker waits, so that workers that wait in different ones are told so.
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
    LONGER,
    Departure,
    WorkerHeartbeat,
    first_sentence,
    name_of,
)
from fleetlight.collective.membership.members import MemberHello
from fleetlight.collective.membership.rendezvous import cloned, surviving_store
from fleetlight.errors import DeadlineError, PeerError, PeerLostError
from fleetlight.torch_compat.c10d import Store

BEAT_S = 0.5
#: beats that may be missed before a worker counts as silent
_MISSED = 4
_ASK_EVERY_S = 0.05
#: hints where a worker left without an error: of a reduction, and of any other call
_OF_GRADIENTS = ". Workers with unequal numbers of batches: fleet.shard(loader) evens them out"
_OF_CALL = ". Every worker must call it, not only some"
#: how long a worker may be silent before those that wait for its work give it up
_LOST_S = 30.0


class Liveness:
    """Beats for this worker in a thread of its own, and asks about the others when needed.

    Made before a worker is known to the others: the one that keeps the store may leave as soon as
    it knows all, and then nobody could connect to it any more.
    """

    def __init__(self, store: Store, index: int) -> None:
        with surviving_store():
            # at once an error if it is gone: a new connection would be tried for the whole deadline
            store.check(["any"])
            # a client of its own: the main thread may hold the other one in a long wait
            self._store = cloned(store)
            # and one more for questions of the main thread, so that a beat never waits for them
            self._asking = cloned(store)
        # In worker 0 this store is the server that everybody asks. torch's process group holds it
        # as well, but closes before the last worker has asked for the last time.
        self._meeting_point: Store | None = store
        self._met_at = time.monotonic()
        self._index = index
        self._others: dict[int, MemberHello] = {}
        self._stop = threading.Event()
        self._count = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self.step = 0
        self._waiting: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat."""
        # here and not before: the thread holds this object, and with it the connections
        self._thread = threading.Thread(target=self._run, name="fleet-liveness", daemon=True)
        with surviving_store():
            self._beat()
        self._thread.start()

    def among(self, hellos: Mapping[int, MemberHello]) -> Liveness:
        """From now on the others are these.

        All workers learn this at about the same moment: their clocks count from here.
        """
        self._met_at = time.monotonic()
        self._others = {i: hello for i, hello in hellos.items() if i != self._index}
        return self

    @property
    def _now(self) -> float:
        """Seconds since the workers met, by a clock that nobody sets."""
        return time.monotonic() - self._met_at

    def depart(self, error: str | None) -> None:
        """Stop beating and tell the others how this worker ended."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=2 * BEAT_S)
        gone = Departure(self.step, self._now, error)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"gone/{self._index}", msgspec.json.encode(gone).decode())

    def farewell(self) -> None:
        """Write the last key to the store, which its server may close once it has all of these."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._index}", "")
        self._meeting_point = None

    def all_left(self) -> bool:
        """True when no other worker will use the store again."""
        return all(self._asking.check([f"left/{i}"]) for i in self._others)

    def all_gone(self) -> bool:
        """True when every other worker has departed."""
        return len(self._departures()) == len(self._others)

    def any_alive(self, silence_s: float) -> bool:
        """True when a worker that has not departed gave a sign of life lately; takes a moment."""
        silences = self._silences(set(self._others) - set(self._departures()))
        time.sleep(_ASK_EVERY_S)
        return any(silence < silence_s for silence in silences.values())

    def _silences(self, workers: Collection[int]) -> dict[int, float]:
        """For how many seconds each worker has given no sign of life, as far as this one knows."""
        now, beats = time.monotonic(), self._beats()
        for index, beat in beats.items():
            if index not in self._seen or self._seen[index][0] != beat.count:
                self._seen[index] = (beat.count, now)
        return {i: now - self._seen[i][1] if i in beats else math.inf for i in workers}

    @contextlib.contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Beats during the block say that this worker waits in `operation`."""
        outer, self._waiting = self._waiting, operation
        try:
            yield
        finally:
            self._waiting = outer

    def meet(
        self, meeting: str, operation: str, deadline_s: float, *, working: bool = False
    ) -> None:
        """Wait until every worker has come to a meeting; name those who have not.

        `working` says that the others have begun what they will come from, such as writing
        files: it may take as long as it takes, and only their silence ends the wait.
        """
        with surviving_store(), self.waiting(operation):
            self._asking.set(f"meet/{meeting}/{self._index}", "here")
            absent = self._await_meeting(meeting, deadline_s, working)
            if absent:
                raise self._missed(absent, operation, deadline_s, working)

    def _await_meeting(self, meeting: str, deadline_s: float, working: bool) -> list[int]:
        """Who is still absent when there is nothing more to wait for."""
        absent, pause = list(self._others), 0.001
        end = time.monotonic() + (BEAT_S if working else deadline_s)
        lost_s = max(min(deadline_s, _LOST_S), BEAT_S * _MISSED)
        while True:
            absent = [i for i in absent if not self._asking.check([f"meet/{meeting}/{i}"])]
            if not absent or any(self._asking.check([f"gone/{i}"]) for i in absent):
                return absent
            if time.monotonic() > end:
                if not working or max(self._silences(absent).values()) > lost_s:
                    return absent
                end += BEAT_S
            time.sleep(pause)
            # a short wait ends at once, and a long one leaves the store in peace
            pause = min(2 * pause, _ASK_EVERY_S)

    def _missed(
        self, absent: Collection[int], operation: str, deadline_s: float, working: bool
    ) -> PeerError:
        """The error of a meeting to which some did not come."""
        gone = {i: end for i, end in self._departures().items() if i in absent}
        failed = [f"{self._name(i)} failed: {end.error}" for i, end in gone.items() if end.error]
        if failed:
            return PeerLostError(f"{operation}: {', '.join(failed)}")
        if gone:
            names = ", ".join(self._name(i) for i in gone)
            return PeerLostError(f"{operation}: {names} left the job without calling it")
        told = self._told(absent)
        if working:
            return PeerLostError(f"{operation}: gave up waiting, {told}")
        return DeadlineError(
            f"{operation}: every worker must call it, but within {deadline_s:g} s some did not: "
            f"{told}; {LONGER}"
        )

    def _told(self, workers: Collection[int]) -> str:
        before = self._beats()
        time.sleep(BEAT_S * _MISSED)
        after, now = self._beats(), self._now
        return ", ".join(
            f"{self._name(i)} {diagnosis.told(before.get(i), after.get(i), now)}" for i in workers
        )

    def _name(self, index: int) -> str:
        return name_of(index, self._others[index])

    def explain(self, error: BaseException, operation: str) -> PeerError:
        """The error to raise in place of a failed or expired collective."""
        late = _is_deadline(error)
        with self.waiting(operation):
            suspects, everybody_there = self._suspects(operation)
        text = f"{operation} at step {self.step} {'timed out' if late else 'failed'}: "
        text += "; ".join(suspects)
        if any("left after step" in s for s in suspects):
            text += _OF_GRADIENTS if "gradients" in operation else _OF_CALL
        elif late and everybody_there:
            text += f"; {LONGER}"
        return (DeadlineError if late else PeerLostError)(f"{text} [{first_sentence(error)}]")

    def _suspects(self, operation: str) -> tuple[list[str], bool]:
        """Sentences about what went wrong, and whether all workers give signs of life."""
        try:
            before, gone = self._beats(), self._departures()
            if gone:
                # whoever has departed is the cause, and the others may be on their way out too
                before = {}
            else:
                time.sleep(BEAT_S * _MISSED)
                gone = self._departures()
            after = self._beats()
        except RuntimeError:
            keeper = self._others.get(0)
            where = f" ({keeper.where()})" if keeper else ""
            return [f"worker 0{where}, which keeps the job's meeting point, does not answer"], False
        me = WorkerHeartbeat(self._count, self.step, self._now)
        found = diagnosis.diagnose(me, before, after, gone, self._others, self._now)
        alive = not gone and all(
            i in after and not diagnosis.is_silent(before.get(i), after[i]) for i in self._others
        )
        return found or [diagnosis.apart(operation, after, self._others)], alive

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._beat()
            except RuntimeError:
                return  # the store is gone; the next collective will say so

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
