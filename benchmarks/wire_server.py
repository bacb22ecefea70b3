# SPDX-License-Identifier: Apache-2.0
"""The server's side of the benchmark `wire`, a process of its own.

Its first line of output says where it listens. Then it answers one word a line: `cpu` with the CPU
seconds it has used, `kernel` with the seconds that a pull takes without any network.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import PeerError
from fleetlight.kernels import Initializer, RowTable, rule_named
from fleetlight.ps import messages as m
from fleetlight.ps.plan import ASYNC, InitializerPlan, OptimizerPlan, Plan, RulePlan, TablePlan
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport import Connection, Listener, Reply
from fleetlight.ps.transport.protocol import Array
from fleetlight.security.context import server_context

_LOOPBACK = ("127.0.0.1", 0)
#: a batch of ids, the width of a row, the ids a table has
IDS, DIM, RESIDENT = 20_000, 16, 1_000_000
#: all dense parameters of a model of 16 M
DENSE_BYTES = 64 << 20


def plan() -> Plan:
    """One table and no dense parameters."""
    table = TablePlan(
        "table", DIM, RulePlan("adagrad", {}), InitializerPlan("uniform", -0.1, 0.1), 0, 0
    )
    return Plan(
        mode=ASYNC,
        worker_num=1,
        server_num=1,
        seed=0,
        tables=[table],
        dense=[],
        optimizers=[OptimizerPlan("torch.optim.adagrad.Adagrad", 1, True)],
    )


def batches(count: int) -> Iterator[NDArray[np.int64]]:
    """Distinct ids of the table, evenly spread."""
    chance = np.random.default_rng(0)
    for _ in range(count):
        yield chance.choice(RESIDENT, IDS, replace=False)


def prepare_raw(connected: socket.socket) -> None:
    """What the transport does to its sockets as well."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Sizes:
    """Answers at once with as many bytes as a server would: what is left is the wire."""

    def __init__(self) -> None:
        self._rows = np.ones((IDS, DIM), np.float32)
        self._dense = np.ones(DENSE_BYTES // 4, np.float32)

    def __call__(
        self, connection: Connection, message: m.Message, arrays: Sequence[Array]
    ) -> Reply:
        if isinstance(message, m.Pull):
            return m.Pulled(0, 0), [self._dense if message.dense else self._rows]
        return m.Done(), ()

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        pass


def serve_raw(door: socket.socket) -> None:
    """Ids in, rows out, by bare socket calls."""
    connection, _ = door.accept()
    prepare_raw(connection)
    ids, rows = bytearray(8 * IDS), bytes(4 * IDS * DIM)
    while connection.recv_into(ids, flags=socket.MSG_WAITALL) == len(ids):
        connection.sendall(rows)


def open_server() -> Server:
    """A real one, with a table of Adagrad."""
    server = Server(0, 1, 1, version="benchmark", deadline_s=60.0)
    server.open(plan(), [], [])
    return server


def kernel_s(table: RowTable, rounds: int) -> float:
    """The median time of a pull of a batch."""
    times = []
    for ids in batches(rounds):
        began = time.perf_counter()
        table.pull(ids)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> int:
    """Serve until the input ends."""
    door = socket.create_server(_LOOPBACK)
    threading.Thread(target=serve_raw, args=(door,), daemon=True).start()
    table = RowTable(DIM, rule_named("adagrad", {}), 0, Initializer("uniform", -0.1, 0.1))
    table.insert(np.arange(RESIDENT))
    sizes = Sizes()
    listeners = {
        "plain": Listener(_LOOPBACK, sizes),
        "TLS": Listener(_LOOPBACK, sizes, tls=server_context(sys.argv[1])),
        "server": Listener(_LOOPBACK, open_server()),
    }
    ports = {name: listener.address[1] for name, listener in listeners.items()}
    print(json.dumps({**ports, "raw": door.getsockname()[1]}), flush=True)
    answers: dict[str, Callable[[], float]] = {
        "cpu": time.process_time,
        "kernel": lambda: kernel_s(table, 200),
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)
    for listener in listeners.values():
        listener.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
