# SPDX-License-Identifier: Apache-2.0
"""`ServerHeartbeats`: the heartbeats of a worker to all servers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fleetlight.errors import PeerError
from fleetlight.ps import messages as m
from fleetlight.ps.transport.interface import Channel
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
