# SPDX-License-Identifier: Apache-2.0
"""`Connections`: the connections of one worker to all servers.

A lane is one connection to each server. Pushes go by one of them, in order, and pulls by others.
Threads take turns on a lane: each has it until all that it has asked is answered. Signs of life
have a lane to themselves: whatever goes by another may take long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import DeadlineError, PeerError, PeerLostError
from fleetlight.ps import messages as m
from fleetlight.ps.messages.base import NO_SIGNAL, ControlSignal
from fleetlight.ps.transport.interface import Answer, Channel, RetryPolicy
from fleetlight.ps.worker.server_heartbeats import ServerHeartbeats

Request = tuple[m.Message, Sequence[NDArray[Any]]]
#: opens a lane, and says hello on it: a channel to each server
Connect = Callable[[str], Sequence[Channel]]
CONTROL, PUSH, PULL, PREFETCH, HEARTBEAT = "control", "push", "pull", "ahead", "beat"
#: how long the last words may wait for a lane, and for their answer
_LANE_S, _LAST_WORDS_S = 1.0, 5.0


class Connections:
    """Each lane is opened when it is first used."""

    def __init__(self, worker: int, server_num: int, connect: Connect) -> None:
        self.worker = worker
        self.server_num = server_num
        self._connect = connect
        self._lanes: dict[str, Sequence[Channel]] = {}
        self._signs = ServerHeartbeats(())
        #: what this worker calls for
        self.wish = NO_SIGNAL
        #: it stops, and comes to no meeting any more
        self.stops = False
        self._closed = False
        #: by server: the last push that it has acknowledged
        self.acknowledged = [0] * server_num
        #: how long a server may be away that comes back; 0: none does
        self._away_s = 0.0
        #: by lane: held from the first word that is sent on it to the last answer
        self._turns: dict[str, threading.Lock] = {}

    def open_lane(self, lane: str) -> Sequence[Channel]:
        """The channels of a lane, opened when it is first used."""
        channels = self._lanes.get(lane)
        if channels is None:
            self._check_not_closed()
            channels = self._lanes[lane] = self._connect(lane)
            self._wait_for_comebacks(lane)
            if lane == HEARTBEAT:
                self._signs = ServerHeartbeats(channels)
            if self._closed:  # meanwhile, by another thread
                _hang_up(channels)
        self._check_not_closed()
        return channels

    def wait_for_comebacks(self, away_s: float) -> None:
        """Servers that die are started again, and know what they have acknowledged."""
        self._away_s = away_s
        for lane in self._lanes:
            self._wait_for_comebacks(lane)

    @property
    def waits_for_comebacks(self) -> bool:
        """Whether servers that die are started again."""
        return self._away_s > 0

    @property
    def may_be_heard_again(self) -> bool:
        """Whether what finds no server now may find one later."""
        return self.waits_for_comebacks and not self._closed

    def _wait_for_comebacks(self, lane: str) -> None:
        if self._away_s:
            # a sign of life does not wait: there are other servers to hear it
            patience = RetryPolicy(0.0 if lane == HEARTBEAT else self._away_s, comes_back=True)
            for channel in self._lanes[lane]:
                channel.patience = patience

    def lives(self, *lanes: str) -> list[int]:
        """By server: in which of its lives these lanes, or any, have found it at last."""
        known = [self._lanes[lane] for lane in lanes or list(self._lanes) if lane in self._lanes]
        return [
            max((_life(channels[server]) for channels in known), default=1)
            for server in range(self.server_num)
        ]

    def _check_not_closed(self) -> None:
        if self._closed:
            raise PeerLostError(f"worker {self.worker} has parted from the servers")

    def everywhere(
        self, message: m.Message, lane: str = CONTROL, deadline_s: float | None = None
    ) -> dict[int, Answer]:
        """The same words to every server."""
        return self.ask(lane, dict.fromkeys(range(self.server_num), (message, ())), deadline_s)

    def ask(
        self,
        lane: str,
        requests: Mapping[int, Request],
        deadline_s: float | None = None,
    ) -> dict[int, Answer]:
        """Send to all, then hear all; one error is raised once nobody owes an answer."""
        with self._turn(lane):
            answers, errors = self._say(lane, requests, deadline_s)
        if errors:
            raise self._cause(errors)
        return answers

    def _turn(self, lane: str) -> threading.Lock:
        """Held by the thread that uses a lane now."""
        return self._turns.get(lane) or self._turns.setdefault(lane, threading.Lock())

    def beat(self, step: int) -> None:
        """Give a sign of life, whatever other lanes are busy with and other servers do."""
        with self._turn(HEARTBEAT):
            self.open_lane(HEARTBEAT)
            self._signs.give(step, self.wish, stops=self.stops)

    @property
    def heard(self) -> ControlSignal:
        """What was called for, as far as this worker has heard; the others may have or not."""
        return self._signs.heard

    @property
    def here(self) -> int | None:
        """How many workers have not left, as far as this one has heard; None: it has not yet."""
        return self._signs.here

    def _cause(self, errors: Mapping[int, Exception]) -> Exception:
        """The first error, unless a server hangs: what others say of that names the innocent."""
        late = self._signs.late()
        for server in late:
            if server in errors:
                return errors[server]
        first = next(iter(errors.values()))
        if late and isinstance(first, DeadlineError):
            told = ", ".join(
                f"{self._lanes[HEARTBEAT][server].peer} (silent for {silent:.0f} s)"
                for server, silent in late.items()
            )
            return DeadlineError(f"no sign of life comes from {told}; meanwhile {first}")
        return first

    def _say(
        self,
        lane: str,
        requests: Mapping[int, Request],
        deadline_s: float | None,
    ) -> tuple[dict[int, Answer], dict[int, Exception]]:
        """The answers of those that could be reached, and what was wrong with the others."""
        channels = self.open_lane(lane)
        errors: dict[int, Exception] = {}
        asked = []
        for server, (message, arrays) in requests.items():
            try:
                channels[server].send(message, arrays)
                asked.append(server)
            except Exception as error:
                errors[server] = error
                # Those that can be reached hear it all the same: a goodbye is meant for each. But
                # what is wrong with the request itself is wrong everywhere.
                if not isinstance(error, PeerError):
                    break
        answers = {}
        for server in asked:
            try:
                answers[server] = channels[server].receive(deadline_s)
                self._is_answered(server, requests[server])
            except Exception as error:
                errors[server] = error
        return answers, errors

    def _in_turns(
        self, lane: str, requests: Mapping[int, Sequence[Request]]
    ) -> dict[int, list[Answer]]:
        """Several requests to each server, which take turns: one answers while the next is asked.

        Both directions of a narrow link are used that way; asked all at once, all servers would be
        sent their requests first and then answer, all at once again.
        """
        with self._turn(lane):
            return self._said_in_turns(lane, requests)

    def _said_in_turns(
        self, lane: str, requests: Mapping[int, Sequence[Request]]
    ) -> dict[int, list[Answer]]:
        channels = self.open_lane(lane)
        answers: dict[int, list[Answer]] = {server: [] for server in requests}
        owing: list[int] = []

        def hear() -> None:
            server = owing.pop(0)
            answers[server].append(channels[server].receive())
            self._is_answered(server, requests[server][len(answers[server]) - 1])

        try:
            for server, (message, arrays) in _round_robin(requests):
                if owing and owing != [server]:
                    channels[owing[0]].expect()
                elif owing:
                    hear()
                channels[server].send(message, arrays)
                owing.append(server)
                if len(owing) > 1:
                    hear()
            while owing:
                hear()
        except Exception:
            # a channel that still owes an answer could not be asked again
            for server in owing:
                with contextlib.suppress(Exception):
                    channels[server].receive()
            raise
        return answers

    def _is_answered(self, server: int, request: Request) -> None:
        """What the server has acknowledged it must still have when it comes back."""
        message, _ = request
        # gradients that are held are no part of its values yet
        if isinstance(message, m.Apply | m.GeoExchange) or (
            isinstance(message, m.Push) and not message.hold
        ):
            self.acknowledged[server] = message.sequence

    def leave(self, error: str = "", *, stopped: bool = False) -> None:
        """Say goodbye to every server, and hang up."""
        try:
            self.everywhere(m.Leave(error, stopped))
            # nobody is harmed where this is not heard: such a server ends a little later
            with contextlib.suppress(PeerError):
                self.everywhere(m.GoodbyeAck(), deadline_s=_LAST_WORDS_S)
        finally:
            self.close()

    def part(self, error: str) -> None:
        """Say why in a hurry: the control lane may be broken, or busy for long."""
        try:
            untold = self._say_goodbye(HEARTBEAT, error, range(self.server_num))
            if untold:
                self._say_goodbye(CONTROL, error, untold)
        finally:
            self.close()

    def _say_goodbye(self, lane: str, error: str, servers: Sequence[int]) -> Sequence[int]:
        """Answers the servers that may not have heard it."""
        lock = self._turn(lane)
        if lane not in self._lanes or not lock.acquire(timeout=_LANE_S):
            return servers
        try:
            # a server that hangs may hear it by a lane on which it owes no answer
            free = self._signs.collect(_LANE_S) if lane == HEARTBEAT else servers
            words = dict.fromkeys([s for s in servers if s in free], (m.Leave(error), ()))
            heard, _ = self._say(lane, words, _LAST_WORDS_S)
        except PeerError:
            return servers
        finally:
            lock.release()
        return [server for server in servers if server not in heard]

    def close(self) -> None:
        """Hang up; other threads that use a lane are told that it is closed."""
        self._closed = True
        for channels in list(self._lanes.values()):
            _hang_up(channels)


def _life(channel: Channel) -> int:
    welcome = None if channel.welcome is None else channel.welcome.message
    return max(1, welcome.life) if isinstance(welcome, m.Welcome) else 1


def _hang_up(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()


def _round_robin(requests: Mapping[int, Sequence[Request]]) -> Iterator[tuple[int, Request]]:
    for number in range(max(map(len, requests.values()), default=0)):
        for server, words in requests.items():
            if number < len(words):
                yield server, words[number]


class IncarnationFence:
    """The newest life of each server that this worker has met, on whichever lane."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def check(self, welcome: m.Message) -> None:
        """Refuse an earlier life; it is tried again, since the later one may answer then."""
        if not isinstance(welcome, m.Welcome) or not welcome.life:
            return
        newest = self._newest.get(welcome.server, 1)
        if welcome.life < newest:
            raise PeerLostError(
                f"server {welcome.server} answers in its life {welcome.life}, but its life "
                f"{newest} has been met before; end the older process"
            )
        self._newest[welcome.server] = welcome.life
