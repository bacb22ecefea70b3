# SPDX-License-Identifier: Apache-2.0
"""`Worker`: a model of the requests of a worker, and of their order.

It models `SocketChannel` (a request is sent again over a new connection, under the same number),
`Client` (the requests for each server) and the communicators (their order). Each thread of the real
ones is a generator here: it yields a request, or what it waits for.

The state that outlives the worker's process is its `Redo`.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tests.chaos.simulation.host import DEADLINE_S, Host
from tests.chaos.simulation.lane import Lane, Words
from tests.chaos.simulation.oracle import Oracle, broken
from tests.chaos.simulation.script import GEO, SYNC, Script, Update
from tests.chaos.simulation.world import World

from fleetlight.ps import messages as m

Array = NDArray[Any]
#: the requests of a thread: a lane, and messages by server; or what it waits for
Asked = tuple[str, dict[int, Words]] | Callable[[], bool]
Thread = Generator[Asked, Any, None]
CONTROL, PUSH, PULL, PREFETCH = "control", "push", "pull", "prefetch"
_QUEUE = 2


class WorkerError(Exception):
    """A server returned an error."""


#: seconds that servers wait for a worker that may restart
_AWAY_S = 1e6


@dataclasses.dataclass
class Redo:
    """The state on a worker's disk, written before a push is sent, and at its reply.

    A process that restarts resumes from it, and repeats the push that may be lost.
    """

    started_at: int
    #: by server: the number of the last push, and its messages
    sequences: list[int]
    last: dict[int, Words] = dataclasses.field(default_factory=dict)
    #: the updates of the last push, until its reply
    pending: list[Update] = dataclasses.field(default_factory=list)
    #: the phase, and how many of its updates were sent
    phase: int = 0
    number: int = 0
    step: int = 0
    meetings: int = 0
    #: how often the worker was started
    incarnation: int = 1


@dataclasses.dataclass
class _Run:
    """A thread, and what it waits for."""

    thread: Thread
    ready: Callable[[], bool] | None = None
    lane: str = ""
    owing: set[int] = dataclasses.field(default_factory=set)
    answers: dict[int, Words] = dataclasses.field(default_factory=dict)
    is_over: bool = False


class Worker:
    """One worker process, from its start to its end."""

    def __init__(
        self,
        world: World,
        index: int,
        script: Script,
        oracle: Oracle,
        hosts: Sequence[Host],
        redo: Redo | None = None,
    ) -> None:
        self.world, self.index, self.script, self.oracle = world, index, script, oracle
        self.redo = redo or Redo(1, [0] * len(hosts))
        self.is_gone = self.has_finished = False
        #: it runs, but no message reaches it
        self.is_asleep = False
        self.failure = ""
        self._hosts = hosts
        self._has_joined = False
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._runs: list[_Run] = []
        self._queue: list[Update] = []
        self._sending = False
        self._steps = self._batches = 0
        #: prefetched rows: the number of the batch, the incarnations they are of, rows by server
        self._ahead: tuple[int, list[int], dict[int, Array]] | None = None

    def __str__(self) -> str:
        return f"worker {self.index}" + "'" * (self.redo.started_at - 1)

    def start(self) -> None:
        """An event: the process starts, once all servers accept workers."""
        if self.is_gone:
            return
        if not self._are_open():
            self.world.later(self.start)
            return
        self._begin(self._train())
        if self.script.mode not in (SYNC, GEO):
            self._begin(self._send())

    def hello(self, lane: Lane) -> m.Greeting:
        """The first request on a connection."""
        return m.Greeting(
            "",
            self.index,
            self.script.workers,
            lane.host.index,
            self.script.servers,
            self.redo.started_at,
            lane.name,
            self._has_joined,
            self.redo.incarnation,
            # in a job whose servers wait for no worker that is gone
            0.0 if self.script.loses_worker else _AWAY_S,
        )

    def dies(self) -> None:
        """An event: the process ends without leaving the job."""
        if not self.is_gone:
            self.world.tell(str(self), "is gone")
            self.is_gone = True
            for lane in self._lanes.values():
                lane.close()

    def breaks(self) -> None:
        """An event: one of its connections is lost."""
        if self._lanes:
            self._lanes[self.world.chance.choice(sorted(self._lanes))].breaks()

    def answered(self, lane: Lane, reply: Words) -> None:
        """A lane has a reply."""
        run = next(run for run in self._runs if run.lane == lane.name and run.owing)
        run.answers[lane.host.index] = reply
        run.owing.discard(lane.host.index)
        if not run.owing:
            answers, run.answers = run.answers, {}
            self._advance(run, answers)
            self._look()

    def _begin(self, thread: Thread) -> None:
        run = _Run(thread)
        self._runs.append(run)
        self._advance(run, None)

    def _look(self) -> None:
        for run in list(self._runs):
            if run.ready is not None and not self.is_gone and run.ready():
                self._advance(run, None)

    def _advance(self, run: _Run, value: Any) -> None:
        try:
            run.ready, run.lane = None, ""
            asked = run.thread.send(value)
            if callable(asked):
                run.ready = asked
                if asked():
                    self.world.later(self._look)
                return
            run.lane = asked[0]
            run.owing = set(asked[1])
            for server, words in asked[1].items():
                self._lane(asked[0], server).ask(words)
        except StopIteration:
            self._runs.remove(run)
        except WorkerError as error:
            self._fails(str(error))

    def _lane(self, name: str, server: int) -> Lane:
        key = name, server
        if key not in self._lanes:
            self._lanes[key] = Lane(self, name, self._hosts[server])
        return self._lanes[key]

    def _fails(self, why: str) -> None:
        self.failure = why
        if not self.script.ends_badly:
            raise broken("cause", f"{self} fails: {why}")
        self.dies()

    def _ask(self, lane: str, words: dict[int, Words]) -> Generator[Asked, Any, dict[int, Words]]:
        if not words:
            return {}
        answers: dict[int, Words] = yield lane, words
        for message, _ in answers.values():
            if isinstance(message, m.Failure):
                raise WorkerError(f"{message.kind}: {message.text}")
        return answers

    def _everywhere(self, message: m.Message) -> Generator[Asked, Any, dict[int, Words]]:
        servers = range(self.script.servers)
        return (yield from self._ask(CONTROL, {server: (message, []) for server in servers}))

    def _train(self) -> Thread:
        yield from self._everywhere(m.Join(self._hosts[0].plan))
        self._has_joined = True
        yield from self._send_again()
        phases = self.script.of(self.index, self.redo.started_at)
        while self.redo.phase < len(phases):
            self._steps = self.redo.number
            updates = phases[self.redo.phase]
            for number in range(self._steps, len(updates)):
                following = updates[number + 1] if number + 1 < len(updates) else None
                yield from self._make(updates[number], following)
                self._steps += 1
            yield lambda: not (self._queue or self._sending)
            yield from self._everywhere(m.EndPhase(self.redo.phase))
            yield from self._meet()
            self._ahead = None
            self.redo.phase, self.redo.number = self.redo.phase + 1, 0
        yield from self._everywhere(m.Leave())
        yield from self._everywhere(m.GoodbyeAck())
        self.has_finished = True
        self.dies()

    def _send_again(self) -> Thread:
        """Repeat the last push of an earlier process, with or without its reply."""
        if self.redo.pending:
            answers = yield from self._ask(PUSH, dict(self.redo.last))
            more = self.redo.pending[-1].more
            applied = self._acknowledge(self.redo.pending, answers)
            if self.script.mode in (SYNC, GEO):
                self.redo.step += applied and not more

    def _are_open(self) -> bool:
        """Resume as after Join."""
        return all(host.server is not None and host.server.is_open for host in self._hosts)

    def _make(self, update: Update, following: Update | None) -> Thread:
        mode = self.script.mode
        yield from self._read(update)
        if mode == GEO:
            yield from self._exchange(update)
        elif mode != SYNC:
            yield lambda: len(self._queue) < _QUEUE
            self._queue.append(update)
            self.redo.step += 1
        else:
            if following is not None and self._prefetches:
                self._batches += 1
                self._begin(self._read_ahead(following, self._batches))
            yield from self._push_together(update, following)

    @property
    def _prefetches(self) -> bool:
        """Whether rows of the next update are pulled beside a push, or returned by its reply."""
        return self.script.merges and not self.index % 2

    def _at_least(self) -> int:
        staleness = self.script.staleness
        return 0 if staleness is None else max(0, self._steps - staleness)

    def _read(self, update: Update) -> Thread:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (not ahead[1] or ahead[1] == self._incarnations()):
            for server, rows in ahead[2].items():
                ids = update.ids[server]
                self.oracle.read(server, ids, rows, self.oracle.floors(ids), f"{self} ahead")
            return
        floors = [self.oracle.floors(ids) for ids in update.ids]
        words = self._pulls(
            update,
            m.Pull(
                [m.TablePull(0, True)], False, self._at_least(), self.redo.phase, self.redo.step
            ),
        )
        answers = yield from self._ask(PULL, words)
        for server, (_, arrays) in answers.items():
            self.oracle.read(server, update.ids[server], arrays[0], floors[server], str(self))

    def _pulls(self, update: Update, message: m.Pull) -> dict[int, Words]:
        return {s: (message, [np.array(ids)]) for s, ids in enumerate(update.ids)}

    def _read_ahead(self, update: Update, batch: int) -> Thread:
        """A thread beside the push of the last step."""
        box: tuple[int, list[int], dict[int, Array]] = batch, [], {}
        self._ahead = box
        message = m.Pull(
            [m.TablePull(0, False)],
            False,
            0,
            self.redo.phase,
            self.redo.step,
            ahead=True,
            batch=batch,
        )
        answers = yield from self._ask(PREFETCH, self._pulls(update, message))
        for server, (_, arrays) in answers.items():
            box[2][server] = arrays[0].copy()
            box[1].append(self._lanes[PREFETCH, server].incarnation)

    def _incarnations(self) -> list[int]:
        return [
            max(lane.incarnation for key, lane in self._lanes.items() if key[1] == server)
            for server in range(self.script.servers)
        ]

    def _push_together(self, update: Update, following: Update | None) -> Thread:
        hold, coming = update.holds, None if self._prefetches else following
        answers = yield from self._push([update], hold, None if hold else coming)
        if hold:
            words: dict[int, Words] = {}
            for server in answers:
                number = self._next(server)
                apply = m.Apply(
                    number, 0, 0, self.redo.step, self.redo.phase, 1.0, [{}], skip=update.skips
                )
                words[server] = apply, []
            answers = yield from self._ask(PUSH, self._with_ahead(words, coming))
            self._acknowledge([update], answers)
        self.redo.step += all(self._applied(message) for message, _ in answers.values())
        if coming is not None:
            # these rows need no correction, so the incarnations do not matter
            self._ahead = 0, [], {s: arrays[0].copy() for s, (_, arrays) in answers.items()}
        elif self._ahead is not None and following is not None:
            # the step waits for it when it needs the rows
            box = self._ahead
            yield lambda: len(box[2]) == self.script.servers
            self._put_in(box, answers)

    def _put_in(
        self, box: tuple[int, list[int], dict[int, Array]], answers: dict[int, Words]
    ) -> None:
        """The rows that the step changed."""
        for server, (message, arrays) in answers.items():
            assert isinstance(message, m.Pushed)
            for number, batch in enumerate(message.batches):
                if batch == box[0]:
                    positions, rows = arrays[2 * number : 2 * number + 2]
                    box[2][server][positions] = rows

    @staticmethod
    def _applied(message: m.Message) -> bool:
        return not isinstance(message, m.Pushed) or message.applied

    def _send(self) -> Thread:
        """The thread that pushes, where the other does not wait for it."""
        while not self.is_gone:
            yield lambda: bool(self._queue)
            updates = [self._queue.pop(0)]
            if (
                self.script.merges
                and self._queue
                and not (updates[0].skips or self._queue[0].skips)
            ):
                updates.append(self._queue.pop(0))
            self._sending = True
            yield from self._push(updates, hold=False)
            self._sending = False

    @staticmethod
    def _with_ahead(words: dict[int, Words], coming: Update | None) -> dict[int, Words]:
        """Request the rows of the next update, too; a repeated push does not."""
        if coming is None:
            return words
        return {
            server: (
                msgspec.structs.replace(message, ahead=[0]),  # type: ignore[call-overload]
                [*arrays, np.array(coming.ids[server])],
            )
            for server, (message, arrays) in words.items()
        }

    def _push(
        self, updates: list[Update], hold: bool, coming: Update | None = None
    ) -> Generator[Asked, Any, dict[int, Words]]:
        words: dict[int, Words] = {}
        self._begins(updates)
        step = self.redo.step if self.script.mode == SYNC else updates[-1].number
        skips = any(one.skips for one in updates) and not hold
        for server in range(self.script.servers):
            message = m.Push(
                self._next(server),
                0,
                0,
                step,
                updates[0].phase,
                [{}],
                [] if skips else [m.TablePush(0)],
                False,
                skip=skips,
                hold=hold,
                merged=len(updates),
            )
            words[server] = message, [] if skips else self._gradients(updates, server)
            self._sends(server, updates, words[server])
        answers = yield from self._ask(PUSH, self._with_ahead(words, coming))
        if not hold:
            self._acknowledge(updates, answers)
        return answers

    def _exchange(self, update: Update) -> Thread:
        words: dict[int, Words] = {}
        self._begins([update])
        floors = [self.oracle.floors(ids) for ids in update.ids]
        for server in range(self.script.servers):
            message = m.GeoExchange(
                self._next(server), 0, self.redo.step, [0], False, more=update.more
            )
            words[server] = message, self._gradients([update], server)
            self._sends(server, [update], words[server])
        answers = yield from self._ask(PUSH, words)
        self._acknowledge([update], answers)
        self.redo.step += not update.more
        for server, (_, arrays) in answers.items():
            self.oracle.read(server, update.ids[server], arrays[0], floors[server], str(self))

    def _begins(self, updates: list[Update]) -> None:
        self.redo.pending = updates
        self.redo.number += len(updates)

    def _sends(self, server: int, updates: list[Update], words: Words) -> None:
        self.redo.last[server] = words
        for update in updates:
            self.oracle.sends(server, update)

    def _next(self, server: int) -> int:
        self.redo.sequences[server] += 1
        return self.redo.sequences[server]

    def _gradients(self, updates: list[Update], server: int) -> list[Array]:
        pairs = [(one, update.column) for update in updates for one in update.ids[server]]
        rows = np.zeros((len(pairs), self.script.width), np.float32)
        for place, (_, column) in enumerate(pairs):
            rows[place, column] = 1
        return [np.array([one for one, _ in pairs]), rows]

    def _acknowledge(self, updates: list[Update], answers: dict[int, Words]) -> bool:
        self.redo.pending = []
        for server, (message, _) in answers.items():
            for update in updates:
                self.oracle.acknowledged(server, update, self._applied(message))
        return all(self._applied(message) for message, _ in answers.values())

    def _meet(self) -> Thread:
        meeting = self.redo.meetings + 1
        mine = np.array([self.index, meeting], np.uint8)
        message = m.Barrier(meeting, "barrier", DEADLINE_S)
        answers = yield from self._ask(CONTROL, {0: (message, [mine])})
        told = [array.tolist() for array in answers[0][1]]
        if told != [[worker, meeting] for worker in range(self.script.workers)]:
            raise broken("meeting", f"{self} was told {told} in meeting {meeting}")
        self.redo.meetings = meeting
