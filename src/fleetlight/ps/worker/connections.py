# SPDX-License-Identifier: Apache-2.0
"""`Connections`: the connections of one worker to all servers.

A lane is one connection to each server. One lane carries all pushes, in order; pulls use others.
A thread locks a lane until all its requests have replies. Heartbeats have a lane of their own,
since requests on other lanes may take long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import DeadlineError, PeerError, PeerLostError
from fleetlight.ps import messages as m
from fleetlight.ps.transport.interface import Channel, ReceivedReply, RetryPolicy
from fleetlight.wire.control_signals import WorkerSignals

#: how long an unreachable server may delay the heartbeats of the others
_REOPEN_S = 0.5


class ServerHeartbeats:
    """Skips servers that have not replied, so that no server delays another.

    One thread at a time uses it; other threads may call `late` only.
    """

    def __init__(self, channels: Sequence[Channel], signals: WorkerSignals) -> None:
        self._channels, self._signals = channels, signals
        #: by server without a reply: when the heartbeat was sent
        self._asked: dict[int, float] = {}
        self._gone: dict[int, PeerError] = {}
        self._late: Mapping[int, float] = {}
        #: number of workers that have not left, by server 0; None before its first reply
        self.active_workers: int | None = None

    def send(self, step: int) -> None:
        """Send a heartbeat to all servers without an outstanding reply; raise if none is left."""
        self.collect()
        self._late = dict(self._asked)
        for server in list(self._gone):
            if self._channels[server].reopen(_REOPEN_S):
                del self._gone[server]
        for server, channel in enumerate(self._channels):
            if server not in self._asked and server not in self._gone:
                try:
                    channel.send(m.Heartbeat(step, self._signals.own, self._signals.stops))
                    self._asked[server] = time.monotonic()
                except PeerError as error:
                    self._gone[server] = error
        hopeless = [
            error
            for server, error in self._gone.items()
            if not self._channels[server].retry.restarts
        ]
        if len(hopeless) == len(self._channels):
            raise hopeless[0]

    def collect(self, within_s: float = 0.0) -> list[int]:
        """Receive replies until then; return the servers without an outstanding reply."""
        end = time.monotonic() + within_s
        for server in list(self._asked):
            channel = self._channels[server]
            try:
                if not channel.has_reply(max(0.0, end - time.monotonic())):
                    continue
                self._receive(server, channel.receive().message)
            except PeerError as error:
                self._gone[server] = error
            del self._asked[server]
        return [server for server in range(len(self._channels)) if server not in self._asked]

    def _receive(self, server: int, reply: m.Message) -> None:
        if isinstance(reply, m.HeartbeatAck):
            self._signals.from_heartbeats |= reply.call
            self.active_workers = self.active_workers if server else reply.here

    def late(self) -> dict[int, float]:
        """Servers that missed at least one heartbeat, with the seconds of silence."""
        now = time.monotonic()
        return {server: now - asked for server, asked in self._late.items()}


Request = tuple[m.Message, Sequence[NDArray[Any]]]
#: opens a lane and greets the servers: a channel to each server
Connect = Callable[[str], Sequence[Channel]]
CONTROL, PUSH, PULL, PREFETCH, HEARTBEAT = "control", "push", "pull", "prefetch", "beat"
#: how long a goodbye may wait for a lane, and for its reply
_LANE_S, _GOODBYE_REPLY_S = 1.0, 5.0


@dataclasses.dataclass(frozen=True)
class SentRequests:
    """Requests without replies yet, and the errors of servers that did not get theirs."""

    lane: str
    requests: Mapping[int, Request]
    asked: Sequence[int]
    errors: dict[int, Exception]


class Connections:
    """Opens each lane when it is first used."""

    def __init__(self, worker: int, server_num: int, connect: Connect) -> None:
        self.worker = worker
        self.server_num = server_num
        self._connect = connect
        self._lanes: dict[str, Sequence[Channel]] = {}
        self.signals = WorkerSignals()
        self._heartbeats = ServerHeartbeats((), self.signals)
        self._closed = False
        #: by server: the last acknowledged push
        self.acknowledged = [0] * server_num
        #: how long a server may take to restart; 0: servers do not restart
        self._away_s = 0.0
        #: by lane: held from the first request to the last reply
        self._lane_locks: dict[str, threading.Lock] = {}

    def open_lane(self, lane: str) -> Sequence[Channel]:
        """Return the channels of a lane; open it if needed."""
        channels = self._lanes.get(lane)
        if channels is None:
            self._check_not_closed()
            channels = self._lanes[lane] = self._connect(lane)
            self._expect_restarts(lane)
            if lane == HEARTBEAT:
                self._heartbeats = ServerHeartbeats(channels, self.signals)
            if self._closed:  # by another thread
                _hang_up(channels)
        self._check_not_closed()
        return channels

    @property
    def servers_are_local(self) -> bool:
        """True if all servers are on this host."""
        return all(channel.is_local for channel in self.open_lane(CONTROL))

    @property
    def server_is_embedded(self) -> bool:
        """True in a job of one process."""
        return all(channel.is_embedded for channel in self.open_lane(CONTROL))

    def bytes_moved(self) -> dict[str, tuple[int, int]]:
        """By lane: how many bytes this worker has sent and received."""
        found = {}
        for lane, channels in list(self._lanes.items()):
            sent, received = zip(*(channel.bytes_moved() for channel in channels), strict=True)
            found[lane] = sum(sent), sum(received)
        return found

    def traffic(self) -> dict[str, float]:
        """Metrics: reconnects, and bytes, which a new connection counts from zero."""
        moved = self.bytes_moved().values()
        lanes = list(self._lanes.values())
        return {
            "sent_bytes": float(sum(sent for sent, _ in moved)),
            "received_bytes": float(sum(received for _, received in moved)),
            "reconnects": float(sum(channel.reconnects for lane in lanes for channel in lane)),
        }

    def expect_restarts(self, away_s: float) -> None:
        """Expect servers to restart after failures with all acknowledged pushes."""
        self._away_s = away_s
        for lane in self._lanes:
            self._expect_restarts(lane)

    @property
    def servers_restart(self) -> bool:
        """True when servers restart after failures."""
        return self._away_s > 0

    @property
    def may_reconnect(self) -> bool:
        """True when a server that is away may return."""
        return self.servers_restart and not self._closed

    def _expect_restarts(self, lane: str) -> None:
        if self._away_s:
            # a heartbeat does not wait: the other servers need theirs
            retry = RetryPolicy(0.0 if lane == HEARTBEAT else self._away_s, restarts=True)
            for channel in self._lanes[lane]:
                channel.retry = retry

    def incarnations(self, *lanes: str) -> list[int]:
        """By server: its newest incarnation on these lanes, or on any lane."""
        known = [self._lanes[lane] for lane in lanes or list(self._lanes) if lane in self._lanes]
        return [
            max((_incarnation(channels[server]) for channels in known), default=1)
            for server in range(self.server_num)
        ]

    def _check_not_closed(self) -> None:
        if self._closed:
            raise PeerLostError(f"worker {self.worker} has disconnected from the servers")

    def everywhere(
        self, message: m.Message, lane: str = CONTROL, deadline_s: float | None = None
    ) -> dict[int, ReceivedReply]:
        """Send one message to every server."""
        return self.ask(lane, dict.fromkeys(range(self.server_num), (message, ())), deadline_s)

    def ask(
        self,
        lane: str,
        requests: Mapping[int, Request],
        deadline_s: float | None = None,
    ) -> dict[int, ReceivedReply]:
        """Send to all servers, then receive from all; raise one error after the last reply."""
        with self._lane_lock(lane):
            return self.replies_to(self.send(lane, requests), deadline_s)

    def send(self, lane: str, requests: Mapping[int, Request]) -> SentRequests:
        """Send to all servers; the lane is in use until `replies_to`."""
        channels = self.open_lane(lane)
        errors: dict[int, Exception] = {}
        asked = []
        for server, (message, arrays) in requests.items():
            try:
                channels[server].send(message, arrays)
                asked.append(server)
            except Exception as error:
                errors[server] = error
                # Reachable servers still receive the request: a goodbye is for each. An error in
                # the request itself is the same for all servers.
                if not isinstance(error, PeerError):
                    break
        return SentRequests(lane, requests, asked, errors)

    def replies_to(
        self, sent: SentRequests, deadline_s: float | None = None
    ) -> dict[int, ReceivedReply]:
        """Receive from all servers; raise one error after the last reply."""
        replies = self._receive(sent, deadline_s)
        if sent.errors:
            raise self._cause(sent.errors)
        return replies

    def _receive(self, sent: SentRequests, deadline_s: float | None) -> dict[int, ReceivedReply]:
        """The replies of reachable servers; the errors of the others are added."""
        channels = self._lanes[sent.lane]
        replies = {}
        for server in sent.asked:
            try:
                replies[server] = channels[server].receive(deadline_s)
                self._acknowledge(server, sent.requests[server])
            except Exception as error:
                sent.errors[server] = error
        return replies

    def _lane_lock(self, lane: str) -> threading.Lock:
        """The lock of a lane."""
        return self._lane_locks.get(lane) or self._lane_locks.setdefault(lane, threading.Lock())

    def heartbeat(self, step: int) -> None:
        """Send a heartbeat, independent of other lanes and of slow servers."""
        with self._lane_lock(HEARTBEAT):
            self.open_lane(HEARTBEAT)
            self._heartbeats.send(step)

    @property
    def active_workers(self) -> int | None:
        """The number of workers that have not left; None before the first heartbeat reply."""
        return self._heartbeats.active_workers

    def count_active(self, workers: int) -> None:
        """Note how many workers train now, if a reply says it."""
        if workers:
            self._heartbeats.active_workers = workers

    def _cause(self, errors: Mapping[int, Exception]) -> Exception:
        """The first error, except when a server hangs: the errors of others blame wrong peers."""
        late = self._heartbeats.late()
        for server in late:
            if server in errors:
                return errors[server]
        first = next(iter(errors.values()))
        if late and isinstance(first, DeadlineError):
            silent = ", ".join(
                f"{self._lanes[HEARTBEAT][server].peer} (silent for {silent:.0f} s)"
                for server, silent in late.items()
            )
            return DeadlineError(f"no heartbeat reply from {silent}; meanwhile {first}")
        return first

    def _ask_in_turns(
        self, lane: str, requests: Mapping[int, Sequence[Request]]
    ) -> dict[int, list[ReceivedReply]]:
        """Send several requests to each server: one replies while the next receives its request.

        This uses both directions of a slow link. Sent at once, all servers would first receive
        their requests and then all reply.
        """
        with self._lane_lock(lane):
            return self._pipeline(lane, requests)

    def _pipeline(
        self, lane: str, requests: Mapping[int, Sequence[Request]]
    ) -> dict[int, list[ReceivedReply]]:
        channels = self.open_lane(lane)
        replies: dict[int, list[ReceivedReply]] = {server: [] for server in requests}
        outstanding: list[int] = []

        def receive_next() -> None:
            server = outstanding.pop(0)
            replies[server].append(channels[server].receive())
            self._acknowledge(server, requests[server][len(replies[server]) - 1])

        try:
            for server, (message, arrays) in _round_robin(requests):
                if outstanding and outstanding != [server]:
                    channels[outstanding[0]].expect()
                elif outstanding:
                    receive_next()
                channels[server].send(message, arrays)
                outstanding.append(server)
                if len(outstanding) > 1:
                    receive_next()
            while outstanding:
                receive_next()
        except Exception:
            # a channel with an outstanding reply cannot send again
            for server in outstanding:
                with contextlib.suppress(Exception):
                    channels[server].receive()
            raise
        return replies

    def _acknowledge(self, server: int, request: Request) -> None:
        """Record an acknowledged push: a restarted server must still have it."""
        message, _ = request
        # held gradients are not part of the values yet
        if isinstance(message, m.Apply | m.GeoExchange) or (
            isinstance(message, m.Push) and not message.hold
        ):
            self.acknowledged[server] = message.sequence

    def leave(self, error: str = "") -> None:
        """Say goodbye to every server and close all lanes."""
        try:
            self.everywhere(m.Leave(error, self.signals.stopped))
            # a server that misses this only ends a little later
            with contextlib.suppress(PeerError):
                self.everywhere(m.GoodbyeAck(), deadline_s=_GOODBYE_REPLY_S)
        finally:
            self.close()

    def report_failure(self, error: str) -> None:
        """Report a failure quickly: the control lane may be broken or busy."""
        try:
            unreached = self._say_goodbye(HEARTBEAT, error, range(self.server_num))
            if unreached:
                self._say_goodbye(CONTROL, error, unreached)
        finally:
            self.close()

    def _say_goodbye(self, lane: str, error: str, servers: Sequence[int]) -> Sequence[int]:
        """Say goodbye on one lane; return the servers that may not have received it."""
        lock = self._lane_lock(lane)
        if lane not in self._lanes or not lock.acquire(timeout=_LANE_S):
            return servers
        try:
            # the heartbeat lane of a hung server may still owe a reply
            free = self._heartbeats.collect(_LANE_S) if lane == HEARTBEAT else servers
            goodbyes = dict.fromkeys([s for s in servers if s in free], (m.Leave(error), ()))
            received = self._receive(self.send(lane, goodbyes), _GOODBYE_REPLY_S)
        except PeerError:
            return servers
        finally:
            lock.release()
        return [server for server in servers if server not in received]

    def close(self) -> None:
        """Close all lanes; other threads that use one get an error."""
        self._closed = True
        for channels in list(self._lanes.values()):
            _hang_up(channels)


def _incarnation(channel: Channel) -> int:
    welcome = None if channel.welcome is None else channel.welcome.message
    return max(1, welcome.incarnation) if isinstance(welcome, m.Welcome) else 1


def _hang_up(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()


def _round_robin(requests: Mapping[int, Sequence[Request]]) -> Iterator[tuple[int, Request]]:
    for number in range(max(map(len, requests.values()), default=0)):
        for server, queue in requests.items():
            if number < len(queue):
                yield server, queue[number]


class IncarnationFence:
    """Refuses an old process of a restarted server, by the newest incarnation of each."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def check(self, welcome: m.Message) -> None:
        """Refuse an older incarnation; the channel retries, and may reach the newer process."""
        if not isinstance(welcome, m.Welcome) or not welcome.incarnation:
            return
        newest = self._newest.get(welcome.server, 1)
        if welcome.incarnation < newest:
            raise PeerLostError(
                f"server {welcome.server} replies as incarnation {welcome.incarnation}, but "
                f"incarnation {newest} has replied before; end the older process"
            )
        self._newest[welcome.server] = welcome.incarnation
