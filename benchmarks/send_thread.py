# SPDX-License-Identifier: Apache-2.0
"""The cost of a background sending thread in a training loop of small operations.

Python runs one thread at a time; a thread that returns from the network may have to wait for
the interpreter's lock. A step of a small network is timed alone, with a push of 20,000 gradients
after each step, and with the push in a thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import jobs, machine, report
from benchmarks.wire import CORES, ServerProcess
from benchmarks.wire_sizes import DIM, IDS
from fleetlight.ps import messages as m
from fleetlight.ps.transport import SocketChannel
from fleetlight.security.certificates import make

CLAIM = "None: it shows what the background thread of the communicators costs and what it saves."
#: Python's own switch interval, and a tenth of it
INTERVALS_S = (5e-3, 5e-4)
Row = tuple[float, float, float]


class Loop:
    """Steps of a network whose operations take microseconds."""

    def __init__(self) -> None:
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.ReLU())]
        self._net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01)
        self._x = torch.randn(64, 32)

    def step(self) -> None:
        """Forward, backward, update."""
        self._optimizer.zero_grad()
        self._net(self._x).square().mean().backward()
        self._optimizer.step()


class Sender:
    """Pushes gradients of a batch, and keeps how long each push took."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._arrays: list[np.ndarray[Any, np.dtype[Any]]] = [
            np.arange(IDS),
            np.ones((IDS, DIM), np.float32),
        ]
        self.seconds: list[float] = []

    def push(self) -> None:
        """Send and wait for the answer."""
        began = time.perf_counter()
        self._channel.call(m.Fill([0], dense=False), self._arrays)
        self.seconds.append(time.perf_counter() - began)


@contextlib.contextmanager
def nobody(sender: Sender) -> Iterator[Callable[[], object]]:
    """Nothing is sent."""
    yield lambda: None


@contextlib.contextmanager
def the_loop(sender: Sender) -> Iterator[Callable[[], object]]:
    """The training loop sends the pushes itself."""
    yield sender.push


@contextlib.contextmanager
def a_thread(sender: Sender) -> Iterator[Callable[[], object]]:
    """A thread sends; a few pushes may wait for it. All are done at the end."""
    orders: queue.Queue[bool] = queue.Queue(4)

    def serve() -> None:
        while orders.get():
            sender.push()

    thread = threading.Thread(target=serve)
    thread.start()
    yield lambda: orders.put(True)
    orders.put(False)
    thread.join()


SENDERS = {"nobody": nobody, "the loop": the_loop, "a thread": a_thread}


def turn(who: str, loop: Loop, sender: Sender, steps: int) -> Row:
    """Microseconds of a step, of CPU in a step, and of a push."""
    sender.seconds.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    with SENDERS[who](sender) as push:
        for _ in range(steps):
            loop.step()
            push()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    pushed = statistics.median(sender.seconds) if sender.seconds else 0.0
    return 1e6 * wall / steps, 1e6 * cpu / steps, 1e6 * pushed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    torch.set_num_threads(1)
    runs: dict[tuple[str, float], list[Row]] = {}
    foreign = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make(folder)
        server = ServerProcess(folder)
        stack.callback(server.stop)
        os.sched_setaffinity(0, {max(CORES)})
        channel = SocketChannel.connect(
            ("127.0.0.1", server.ports["plain"]), "server", deadline_s=60.0
        )
        stack.callback(channel.close)
        channel.call(m.Heartbeat(0))
        loop, sender = Loop(), Sender(channel)
        turn("a thread", loop, sender, 50)
        for _ in range(options.rounds):
            machine.wait_until_idle(options.idle_s)
            own = time.process_time() + server.ask("cpu")
            with machine.Meter() as meter:
                for interval in INTERVALS_S:
                    sys.setswitchinterval(interval)
                    for who in SENDERS:
                        row = turn(who, loop, sender, options.steps)
                        runs.setdefault((who, interval), []).append(row)
            own = time.process_time() + server.ask("cpu") - own
            foreign.append(machine.foreign_share(meter.wall_s, meter.busy_s, own))
    sections = [_section(runs), report.foreign_line(foreign)]
    if options.write:
        path = report.write("send_thread", CLAIM, sections)
        sections.append(f"written: {path.relative_to(jobs.ROOT)}")
    print("\n\n".join(sections))
    return 0


def _section(runs: dict[tuple[str, float], list[Row]]) -> str:
    rows = [
        (who, f"{1e3 * interval:g}", *(str(report.Spread.of(column)) for column in zip(*of)))  # noqa: B905
        for (who, interval), of in runs.items()
    ]
    head = ("who sends", "switch interval, ms", "a step, us", "its CPU, us", "a push, us")
    return f"## A loop of small operations that pushes {IDS:,} gradients a step\n\n" + report.table(
        head, rows
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300, help="steps of each variant in a round")
    parser.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    parser.add_argument("--no_write", dest="write", action="store_false", help="print only")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
