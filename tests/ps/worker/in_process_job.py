# SPDX-License-Identifier: Apache-2.0
"""A client and its servers in one process, with a log of the client's requests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests.ps.serving import DIM, OPTIONS, opened, plan

from fleetlight.errors import PeerLostError
from fleetlight.kernels import dedup
from fleetlight.ps import messages as m
from fleetlight.ps.transport.interface import DEFAULT_RETRY, MemoryChannel, ReceivedReply
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal
from fleetlight.ps.worker.reply_values import Wanted


class LoggingChannel:
    """A channel that logs its requests and fails on demand."""

    welcome = None
    retry = DEFAULT_RETRY
    is_local = is_embedded = False

    def __init__(self, inner: Any, log: list[Any], server: int) -> None:
        self.peer = f"server {server}"
        self._inner, self._log, self._server = inner, log, server
        self.fails_in: str | None = None
        #: the order of calls, on all lanes of all servers
        self.events: list[str] = []
        self.closed = False

    def output(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._inner.output(shape, dtype)

    def send(self, message: m.Message, arrays: Sequence[Any] = ()) -> None:
        if self.fails_in == "send":
            raise PeerLostError(f"{self.peer} is gone")
        self._log.append((self._server, message))
        self.events.append(f"send {self._server}")
        self._inner.send(message, arrays)

    def expect(self, deadline_s: float | None = None) -> None:
        self.events.append(f"expect {self._server}")
        self._inner.expect(deadline_s)

    def reopen(self, limit_s: float) -> bool:
        return False

    def has_reply(self, within_s: float) -> bool:
        return bool(self._inner.has_reply(within_s))

    def receive(self, deadline_s: float | None = None) -> ReceivedReply:
        self.events.append(f"receive {self._server}")
        reply: ReceivedReply = self._inner.receive(deadline_s)
        if self.fails_in == "receive":
            raise PeerLostError(f"{self.peer} hung up")
        return reply

    def close(self) -> None:
        self.closed = True
        self._inner.close()


class InProcessJob:
    """A client and its servers; `log` holds (server, request)."""

    def __init__(
        self,
        servers: int = 2,
        mode: str = "async",
        journal: WorkerJournal | None = None,
        **facts: Any,
    ) -> None:
        self.plan = plan(mode, 1, server_num=servers, **facts)
        self.servers = [opened(self.plan, index=i) for i in range(servers)]
        self.log: list[tuple[int, Any]] = []
        self.lanes: dict[str, list[LoggingChannel]] = {}
        self.client = Client(0, 1, servers, self.connect, journal)
        self.client.join(self.plan)
        self.live = LocalParameters([torch.ones(d.shape) for d in self.plan.dense])

    def connect(self, lane: str) -> list[Any]:
        channels = []
        for server in self.servers:
            channel = MemoryChannel(server)
            channel.call(m.Greeting("test", 0, 1, server.index, len(self.servers), 1, lane))
            channels.append(LoggingChannel(channel, self.log, server.index))
        self.lanes[lane] = channels
        return channels

    def receivers(self, kind: type) -> list[int]:
        """The servers that received such a request since the last call."""
        servers = [server for server, message in self.log if isinstance(message, kind)]
        self.log.clear()
        return servers

    def wanted(self, *ids: int, table: int = 0, insert: bool = True) -> Wanted:
        return Wanted(table, dedup(np.array(ids, np.int64), len(self.servers)), insert)

    def push_request(
        self, ids: Sequence[int], value: float = -1.0, dense: Any = None, step: int = 0
    ) -> PushRequest:
        distinct = dedup(np.array(ids, np.int64), len(self.servers))
        grads = np.full((len(distinct.ids), DIM), value, np.float32)
        part = TableGradients(distinct.ids, distinct.starts, grads)
        update = Update(0, step, OPTIONS, {0: part}, {0: dense})
        return self.client.build_push(update, self.live)

    def first_values(self, *ids: int, **of: Any) -> list[float]:
        wanted = self.wanted(*ids, **of)
        [rows] = self.client.pull([wanted]).rows
        return [float(row[0]) for row in rows[wanted.ids.inverse]]
