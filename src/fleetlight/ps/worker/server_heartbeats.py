# SPDX-License-Identifier: Apache-2.0
"""`ServerHeartbeats`: the heartbeats of a worker to all servers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fleetlight.errors import PeerError
from fleetlight.ps import messages as m
from fleetlight.ps.messages.base import NO_SIGNAL, ControlSignal
from fleetlight.ps.transport.interface import Channel

#: how long a server that is away may keep the others waiting for theirs
_REOPEN_S = 0.5


class ServerHeartbeats:
    """No server waits for another: who still owes an answer is left out until it gives it.

    One thread at a time uses it; only `late` may be called by others.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        #: when those were asked that have not answered
        self._asked: dict[int, float] = {}
        self._gone: dict[int, PeerError] = {}
        self._late: Mapping[int, float] = {}
        #: what the servers have said was called for
        self.heard = NO_SIGNAL
        #: how many workers have not left, as server 0 told last; None: it has not told yet
        self.here: int | None = None

    def give(self, step: int, call: ControlSignal = NO_SIGNAL, *, stops: bool = False) -> None:
        """To all that owe no answer; raises once there is nobody left to hear it."""
        self.collect()
        self._late = dict(self._asked)
        for server in list(self._gone):
            if self._channels[server].reopen(_REOPEN_S):
                del self._gone[server]
        for server, channel in enumerate(self._channels):
            if server not in self._asked and server not in self._gone:
                try:
                    channel.send(m.Heartbeat(step, call, stops))
                    self._asked[server] = time.monotonic()
                except PeerError as error:
                    self._gone[server] = error
        hopeless = [
            error
            for server, error in self._gone.items()
            if not self._channels[server].patience.comes_back
        ]
        if len(hopeless) == len(self._channels):
            raise hopeless[0]

    def collect(self, within_s: float = 0.0) -> list[int]:
        """Take in the answers that are there by then; which servers owe none any more."""
        end = time.monotonic() + within_s
        for server in list(self._asked):
            channel = self._channels[server]
            try:
                if not channel.answered(max(0.0, end - time.monotonic())):
                    continue
                self._hear(server, channel.receive().message)
            except PeerError as error:
                self._gone[server] = error
            del self._asked[server]
        return [server for server in range(len(self._channels)) if server not in self._asked]

    def _hear(self, server: int, answer: m.Message) -> None:
        if isinstance(answer, m.HeartbeatAck):
            self.heard |= answer.call
            self.here = self.here if server else answer.here

    def late(self) -> dict[int, float]:
        """The servers that let at least one sign of life pass, and for how many seconds."""
        now = time.monotonic()
        return {server: now - asked for server, asked in self._late.items()}
