# SPDX-License-Identifier: Apache-2.0
"""Two workers train; two join before the second epoch, and all but worker 0 leave before the last.

It runs `benchmarks/quality_train.py`, whose workers wait before each epoch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PROGRAM = Path(__file__).parent / "quality_train.py"
DEADLINE_S = 500.0


class Members:
    """The processes of the job."""

    def __init__(self, arguments: Sequence[str], epochs: int, marks: Path) -> None:
        self._command = [sys.executable, str(PROGRAM), *arguments, "--marks", str(marks)]
        self._epochs, self._marks = epochs, marks
        self._end = time.monotonic() + DEADLINE_S
        server, master = (f"127.0.0.1:{_free_port()}" for _ in range(2))
        self._job = {
            "FLEET_WORKER_NUM": "2",
            "FLEET_WORKER_MAX": "4",
            "FLEET_SERVER_NUM": "1",
            "FLEET_SERVER_ENDPOINTS": server,
            "FLEET_MASTER": master,
        }
        self._join = {"FLEET_JOIN": server}
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """The exit code: that of the first process that failed."""
        self._start({**self._job, "FLEET_ROLE": "server", "FLEET_INDEX": "0"})
        for index in range(2):
            self._start({**self._job, "FLEET_ROLE": "worker", "FLEET_INDEX": str(index)})
        self._go(0)
        for epoch in range(1, self._epochs):
            self._wait_for(f"epoch.{epoch}")
            if epoch == 1:
                newcomers = [self._start(self._join) for _ in range(2)]
                for worker in (2, 3):
                    self._wait_for(f"ready.{worker}")
            if epoch == self._epochs - 1:
                for leaver in (self._running[2], *newcomers):
                    leaver.send_signal(signal.SIGTERM)
            self._go(epoch)
        codes = [one.wait(max(1.0, self._end - time.monotonic())) for one in self._running]
        return next((code for code in codes if code), 0)

    def end(self) -> None:
        """End what still runs."""
        for one in self._running:
            one.kill()

    def _start(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        self._running.append(subprocess.Popen(self._command, env=environment))
        return self._running[-1]

    def _go(self, epoch: int) -> None:
        (self._marks / f"go.{epoch}").touch()

    def _wait_for(self, name: str) -> None:
        self._wait(lambda: (self._marks / name).exists())

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            failed = [one.returncode for one in self._running if one.poll()]
            if failed or time.monotonic() > self._end:
                raise SystemExit(f"the job failed or was late: {failed}")
            time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    """Run the job with the arguments of the training."""
    arguments = sys.argv[1:]
    epochs = int(arguments[arguments.index("--epochs") + 1])
    with tempfile.TemporaryDirectory() as folder:
        members = Members(arguments, epochs, Path(folder))
        try:
            code = members.run()
        finally:
            members.end()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
