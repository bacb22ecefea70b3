# SPDX-License-Identifier: Apache-2.0
"""Run a script of a probe, and write its counters into a folder meanwhile.

    python -m fleetlight.fleet.probed_script FOLDER SCRIPT ARGUMENTS

`fleetlight plan` starts it in each process of a short job.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path

import msgspec
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleetlight.fleet.job import Job, current_or_none
from fleetlight.fleet.served.job import ServedJob
from fleetlight.fleet.server.job import ServerJob
from fleetlight.launch.capacity.samples import ServerSample, WorkerSample

_EVERY_S = 0.1


def main() -> None:
    """Run the script as if it were started itself."""
    folder, script, *arguments = sys.argv[1:]
    threading.Thread(target=_sample, args=(Path(folder), _StepTimes()), daemon=True).start()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


class _StepTimes:
    """The times between the steps of all optimizers."""

    def __init__(self) -> None:
        self.intervals = (0, 0.0, 0.0)
        self._last: float | None = None
        register_optimizer_step_post_hook(lambda *_: self._add(time.perf_counter()))

    def _add(self, now: float) -> None:
        if self._last is not None:
            (count, total, squares), one = self.intervals, now - self._last
            self.intervals = count + 1, total + one, squares + one * one
        self._last = now


def _sample(folder: Path, times: _StepTimes) -> None:
    """Append a line for each sample, until the process ends."""
    while True:
        job = current_or_none()
        sample = None if job is None else _of_server(job) or _of_worker(job, times)
        if job is not None and sample is not None:
            path = folder / f"{job.role.kind.value}{job.role.index}"
            with path.open("ab") as file:
                file.write(msgspec.json.encode(sample) + b"\n")
        time.sleep(_EVERY_S)


def _of_server(job: Job) -> ServerSample | None:
    if not isinstance(job, ServerJob):
        return None
    figures = job.process.server.figures()
    return ServerSample(
        at=time.monotonic(),
        cpu_s=_cpu_s(),
        ready_s=sum(map(_ready_s, _other_threads())),
        memory=_memory(),
        rows=sum(figures.rows.values()),
        row_bytes=sum(figures.nbytes.values()),
    )


def _of_worker(job: Job, times: _StepTimes) -> WorkerSample | None:
    if not isinstance(job, ServedJob) or not job.session.is_open:
        return None
    plan, share = job.session.bound.plan, job.batch_weights and job.batch_weights.now
    return WorkerSample(
        at=time.monotonic(),
        cpu_s=_cpu_s(),
        busy_s=_busy_s(),
        # of the main thread
        ready_s=_ready_s(Path("/proc/self/schedstat")),
        memory=_memory(),
        mode=plan.mode,
        k_steps=plan.k_steps,
        tables=len(plan.tables),
        steps=job.step,
        batch=share.mine if share else None,
        lanes=job.session.client.bytes_moved(),
        intervals=times.intervals,
    )


def _memory() -> int:
    """Bytes of memory in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cpu_s() -> float:
    """CPU seconds of this process, without those of the thread that samples."""
    return time.process_time() - time.thread_time()


def _busy_s() -> float:
    """CPU seconds of all programs since the machine started; 0 where the system has no count."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _other_threads() -> list[Path]:
    """The kernel's figures about all threads but the one that samples."""
    own = str(threading.get_native_id())
    found = Path("/proc/self/task").glob("*/schedstat")
    return [path for path in found if path.parent.name != own]


def _ready_s(path: Path) -> float:
    """How long a thread was ready and had no core; 0 where the kernel does not count it."""
    try:
        return int(path.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


if __name__ == "__main__":
    main()
