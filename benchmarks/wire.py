# SPDX-License-Identifier: Apache-2.0
"""What a byte costs between worker and server, and how long a pull takes.

A server process and this one have a core each. CPU seconds are those of both; iperf3 moves bytes
with the same congestion control and does nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import interleave, jobs, machine, report
from benchmarks.wire_server import DENSE_BYTES, DIM, IDS, batches, plan, prepare_raw
from fleetlight.kernels import dedup
from fleetlight.ps import messages as m
from fleetlight.ps.transport import SocketChannel
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.reply_values import Wanted
from fleetlight.security.certificates import make
from fleetlight.security.context import client_context

CLAIM = (
    "Between worker and server a GB costs at most 2.3 times the CPU seconds of iperf3 (both sides, "
    "same congestion control), in shared memory at most 1.0 times; with TLS at most 1.5 s; a pull "
    "of 20,000 ids takes at most 1.3 times a bare ping-pong of the same bytes and the table's work."
)
CORES = os.sched_getaffinity(0)
PLAIN_RATIO, MEMORY_RATIO, TLS_S, PULL_RATIO = 2.3, 1.0, 1.5, 1.3
ROWS_BYTES, IDS_BYTES = 4 * IDS * DIM, 8 * IDS
_ROWS = m.Pull([m.TablePull(0, True)], dense=False)
_DENSE = m.Pull([], dense=True)
_PUSH = m.Fill([0], dense=False)


class ServerProcess:
    """The other side, on a core of its own."""

    def __init__(self, certificates: str) -> None:
        argv = [sys.executable, "-m", "benchmarks.wire_server", certificates]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=_on_core_0
        )
        self.ports: dict[str, int] = self._line()

    def ask(self, word: str) -> float:
        """A word, and the number that comes back."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def stop(self) -> None:
        """Let it end."""
        self._process.communicate(timeout=30)

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _on_core_0() -> None:
    os.sched_setaffinity(0, {min(CORES)})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = interleave.parser(__doc__, rounds=7)
    add = parser.add_argument
    add("--gigabytes", type=float, default=1.0, help="moved by each in a round")
    add("--pulls", type=int, default=1000, help="pulls in a round")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.gigabytes, options.pulls = 1, 0.05, 10
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make(folder)
        server = ServerProcess(folder)
        stack.callback(server.stop)
        os.sched_setaffinity(0, {max(CORES)})
        moves = _moves(server, folder, stack)
        pulls = Pulls(server, stack)
        costs: dict[str, list[float]] = {name: [] for name in ("iperf3", *moves)}
        times: list[tuple[float, float, float]] = []
        foreign = []
        for number in range(options.rounds):
            machine.wait_until_idle(options.idle_s)
            with machine.Meter() as meter:
                own = _own_cpu_s(server)
                _round(server, moves, costs, options.gigabytes)
                times.append(pulls.measure(options.pulls))
                own = _own_cpu_s(server) - own
            foreign.append(meter.foreign(own))
            print(f"round {number + 1}/{options.rounds} done", flush=True)
    sections = [
        _cost_section(costs),
        _pull_section(times),
        report.foreign_line(foreign),
    ]
    return report.page("wire", CLAIM, sections, options.quick)


def _own_cpu_s(server: ServerProcess) -> float:
    return time.process_time() + server.ask("cpu") + jobs.children_cpu_s()


def _moves(
    server: ServerProcess, folder: str, stack: contextlib.ExitStack
) -> dict[str, tuple[Callable[[], object], int]]:
    """What moves bytes: a call, and how many bytes it moves."""
    ids, grads = np.arange(IDS), np.ones((IDS, DIM), np.float32)
    moves: dict[str, tuple[Callable[[], object], int]] = {}
    for kind, port in (("plain", "plain"), ("memory", "plain"), ("TLS", "TLS")):
        channel = _channel(server, kind, port, folder, stack)
        calls: list[tuple[str, m.Message, list[Any], int]] = [
            ("pull", _ROWS, [ids], IDS_BYTES + ROWS_BYTES),
            ("push", _PUSH, [ids, grads], IDS_BYTES + ROWS_BYTES),
            ("dense", _DENSE, [], DENSE_BYTES),
        ]
        for name, message, arrays, size in calls:
            moves[f"{kind} {name}"] = _call(channel, message, arrays), size
    return moves


def _channel(
    server: ServerProcess, kind: str, port: str, folder: str, stack: contextlib.ExitStack
) -> SocketChannel:
    channel = SocketChannel.connect(
        ("127.0.0.1", server.ports[port]),
        "server",
        deadline_s=60.0,
        tls=client_context(folder) if kind == "TLS" else None,
        on_sharing=_check_sharing if kind == "memory" else None,
    )
    stack.callback(channel.close)
    channel.call(m.Heartbeat(0))
    return channel


def _check_sharing(why: str) -> None:
    if why:
        raise jobs.BenchmarkError(f"the server shares no memory: {why}")


def _call(channel: SocketChannel, message: m.Message, arrays: list[Any]) -> Callable[[], object]:
    return lambda: channel.call(message, arrays)


def _round(
    server: ServerProcess,
    moves: Mapping[str, tuple[Callable[[], object], int]],
    costs: dict[str, list[float]],
    gigabytes: float,
) -> None:
    """CPU seconds per GB of everything once."""
    if shutil.which("iperf3"):
        costs["iperf3"].append(_iperf3(gigabytes))
    for name, (move, size) in moves.items():
        move()
        count = max(1, round(gigabytes * 1e9 / size))
        before = time.process_time() + server.ask("cpu")
        for _ in range(count):
            move()
        spent = time.process_time() + server.ask("cpu") - before
        costs[name].append(spent / (count * size / 1e9))


def _iperf3(gigabytes: float) -> float:
    """CPU seconds per GB of iperf3's two sides, as it counts them itself: without its start."""
    port = str(jobs.free_port())
    serve = ["iperf3", "-s", "-1", "-p", port, "--forceflush"]
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, text=True, preexec_fn=_on_core_0
    ) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        send = ["iperf3", "-c", "127.0.0.1", "-p", port, "-C", "reno", "-J", "-n", f"{gigabytes}G"]
        told = subprocess.run(send, check=True, capture_output=True, timeout=120).stdout
        server.communicate(timeout=30)
    end = json.loads(told)["end"]
    shares = end["cpu_utilization_percent"]
    spent = (shares["host_total"] + shares["remote_total"]) / 100 * end["sum_sent"]["seconds"]
    return float(spent / (end["sum_sent"]["bytes"] / 1e9))


class Pulls:
    """A pull of 20,000 ids from a real server, and the same bytes without one."""

    def __init__(self, server: ServerProcess, stack: contextlib.ExitStack) -> None:
        self._server = server
        self._raw = socket.create_connection(("127.0.0.1", server.ports["raw"]))
        stack.callback(self._raw.close)
        prepare_raw(self._raw)
        self._rows = bytearray(ROWS_BYTES)
        self._client = Client(0, 1, 1, self._connect)
        self._client.join(plan())
        stack.callback(self._client.leave)
        self._wanted = [[Wanted(0, dedup(ids), True)] for ids in batches(50)]

    def measure(self, count: int) -> tuple[float, float, float]:
        """Seconds of a bare ping-pong, of the table's work, and of a pull: medians."""
        raw, pulled = [], []
        for number in range(count):
            wanted = self._wanted[number % len(self._wanted)]
            # in turn: whatever else the machine does meets both
            raw.append(_timed(lambda ids=wanted[0].ids.ids: self._ping(ids)))  # type: ignore[misc]
            pulled.append(_timed(lambda w=wanted: self._client.pull(w)))  # type: ignore[misc]
        return statistics.median(raw), self._server.ask("kernel"), statistics.median(pulled)

    def _ping(self, ids: Any) -> None:
        self._raw.sendall(ids)
        self._raw.recv_into(self._rows, flags=socket.MSG_WAITALL)

    def _connect(self, lane: str) -> Sequence[SocketChannel]:
        hello = m.Greeting("benchmark", 0, 1, 0, 1, started_at=1, lane=lane)
        endpoint = ("127.0.0.1", self._server.ports["server"])
        return [SocketChannel.connect(endpoint, "server", deadline_s=60.0, greeting=lambda: hello)]


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _cost_section(costs: Mapping[str, Sequence[float]]) -> str:
    """CPU seconds per GB, and how they stand to iperf3's of the same round."""
    rows = []
    for name, seconds in costs.items():
        if seconds:
            spread = report.Spread.of(seconds)
            rows.append((name, str(spread), *_against(name, seconds, costs["iperf3"])))
    head = ("what moves", "CPU s per GB, both sides", "times iperf3", "at most")
    missing = "" if costs["iperf3"] else "\n\niperf3 is not installed: no ratios."
    return f"## What a GB costs\n\n{report.table(head, rows)}{missing}"


def _against(name: str, seconds: Sequence[float], iperf: Sequence[float]) -> tuple[str, str]:
    if name == "iperf3" or not iperf:
        return "-", "-"
    ratio = report.Spread.of(a / b for a, b in zip(seconds, iperf, strict=True))
    if name.startswith("TLS"):
        return str(ratio), report.at_most(report.Spread.of(seconds).median, TLS_S)
    limit = MEMORY_RATIO if name.startswith("memory") else PLAIN_RATIO
    return str(ratio), report.at_most(ratio.median, limit)


def _pull_section(times: Sequence[tuple[float, float, float]]) -> str:
    """The median times of every round, and their ratio."""
    raw, kernel, pulled = (report.Spread.of(1e6 * t for t in of) for of in zip(*times, strict=True))
    ratio = report.Spread.of(pull / (ping + work) for ping, work, pull in times)
    head = ("p50, microseconds", "median of the rounds (min..max)")
    rows = [
        (f"bare ping-pong of {IDS_BYTES:,} and {ROWS_BYTES:,} bytes", str(raw)),
        (f"the table's pull of {IDS:,} ids", str(kernel)),
        ("pull by a client from a server", str(pulled)),
        (
            "pull / (ping-pong + table)",
            f"{ratio}, at most {report.at_most(ratio.median, PULL_RATIO)}",
        ),
    ]
    return f"## A pull of {IDS:,} ids\n\n{report.table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
