# SPDX-License-Identifier: Apache-2.0
"""What a byte costs between worker and server, and how long a pull takes.

A server process and this one have a core each. CPU seconds are those of both; iperf3 moves bytes
with the same congestion control and does nothing else. A short message shows what Python costs.
What TLS adds is compared with the cipher alone, as `openssl speed` counts it; with LD_LIBRARY_PATH
set to the libraries of another OpenSSL, both sides use that one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import ssl
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
    "of 20,000 ids takes at most 1.3 times a bare ping-pong of the same bytes and the table's "
    "work. A message costs its sender and its receiver at most 30 microseconds of Python each."
)
#: the suite that both sides prefer
CIPHER = "aes-256-gcm"
CORES = os.sched_getaffinity(0)
PLAIN_RATIO, MEMORY_RATIO, TLS_S, PULL_RATIO = 2.3, 1.0, 1.5, 1.3
#: user CPU time of a message on each side, and the ids of a short one
MESSAGE_US, FEW = 30.0, 32
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
    add("--messages", type=int, default=5000, help="short ones in a round")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.gigabytes, options.pulls, options.messages = 1, 0.05, 10, 100
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make(folder)
        server = ServerProcess(folder)
        stack.callback(server.stop)
        os.sched_setaffinity(0, {max(CORES)})
        moves = _moves(server, folder, stack)
        pulls = Pulls(server, stack)
        channel = _channel(server, "plain", "plain", folder, stack)
        costs: dict[str, list[float]] = {name: [] for name in ("iperf3", *moves)}
        times: list[tuple[float, float, float]] = []
        short: list[tuple[float, float]] = []
        foreign = []
        for number in range(options.rounds):
            machine.wait_until_idle(options.idle_s)
            with machine.Meter() as meter:
                own = _own_cpu_s(server)
                _round(server, moves, costs, options.gigabytes)
                times.append(pulls.measure(options.pulls))
                short.append(_short_messages(server, channel, options.messages))
                own = _own_cpu_s(server) - own
            foreign.append(meter.foreign(own))
            print(f"round {number + 1}/{options.rounds} done", flush=True)
    sections = [
        _cost_section(costs),
        _tls_section(costs),
        _pull_section(times),
        _short_section(short),
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


def _short_messages(
    server: ServerProcess, channel: SocketChannel, count: int
) -> tuple[float, float]:
    """Seconds of user CPU time of a message, in this process and in the server.

    A request and its reply are two messages, and each side sends one and receives the other. The
    system counts the time of its calls separately.
    """
    ids, grads = np.arange(FEW), np.ones((FEW, DIM), np.float32)
    channel.call(_PUSH, [ids, grads])
    here, there = _user_s(), server.ask("user")
    for _ in range(count):
        channel.call(_PUSH, [ids, grads])
    return (_user_s() - here) / (2 * count), (server.ask("user") - there) / (2 * count)


def _user_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


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


def _tls_section(costs: Mapping[str, Sequence[float]]) -> str:
    """What TLS adds to a GB, and the share of it that the cipher alone would take."""
    cipher = _cipher_s()
    rows = []
    for name in [name for name in costs if name.startswith("TLS ")]:
        plain = costs[name.replace("TLS", "plain")]
        added = [a - b for a, b in zip(costs[name], plain, strict=True)]
        ratio = report.Spread.of(b / a for a, b in zip(costs[name], plain, strict=True))
        share = "-" if cipher is None else str(report.Spread.of(cipher / one for one in added))
        rows.append((name.removeprefix("TLS "), str(report.Spread.of(added)), str(ratio), share))
    head = ("what moves", "CPU s that TLS adds to a GB", "plain / TLS", "cipher alone / added")
    floor = "openssl is not installed" if cipher is None else f"{cipher:.3f} CPU s per GB"
    text = f"The cipher alone, {CIPHER} in records of 16 KiB on both sides: {floor}."
    return f"## What TLS adds, {ssl.OPENSSL_VERSION}\n\n{report.table(head, rows)}\n\n{text}"


def _cipher_s() -> float | None:
    """CPU seconds to encrypt and decrypt a GB; None without the program openssl."""
    if shutil.which("openssl") is None:
        return None
    command = ["openssl", "speed", "-seconds", "1", "-bytes", "16384", "-evp", CIPHER]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    thousands_per_s = float(told.split()[-1].removesuffix("k"))
    return 2 * 1e9 / (1e3 * thousands_per_s)


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


def _short_section(times: Sequence[tuple[float, float]]) -> str:
    """The user CPU time of a message on each side."""
    rows = []
    for side, of in zip(("worker", "server"), zip(*times, strict=True), strict=True):
        spread = report.Spread.of(1e6 * seconds for seconds in of)
        rows.append((side, str(spread), report.at_most(spread.median, MESSAGE_US)))
    head = ("side", "user CPU, microseconds a message: median of the rounds (min..max)", "at most")
    title = f"## A message with {FEW} ids and their gradients, and its reply"
    return f"{title}\n\n{report.table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
