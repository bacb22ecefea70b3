# SPDX-License-Identifier: Apache-2.0
"""The machine of a benchmark, and the load by other programs during it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import ssl
import time
from pathlib import Path
from typing import Any


def describe() -> dict[str, str]:
    """The properties of this machine on which results depend."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "CPU": _cpu_model(),
        "cores": str(cores()),
        "memory": f"{pages / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "PyTorch": importlib.metadata.version("torch"),
        "OpenSSL": ssl.OPENSSL_VERSION,
        "congestion control": _first_line("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


class Meter:
    """Wall time, CPU time of this process and of the whole machine between entry and exit."""

    wall_s: float
    own_s: float
    #: None where the system has no count
    busy_s: float | None

    def __enter__(self) -> Meter:
        self._before = _busy_s(), time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        busy, own, wall = self._before
        self.wall_s, self.own_s = time.perf_counter() - wall, time.process_time() - own
        now = _busy_s()
        self.busy_s = None if busy is None or now is None else now - busy

    def foreign(self, own_s: float | None = None) -> float | None:
        """The share of the machine that other programs used; `own_s` if several processes ran."""
        return foreign_share(self.wall_s, self.busy_s, self.own_s if own_s is None else own_s)


def foreign_share(wall_s: float, busy_s: float | None, own_s: float) -> float | None:
    """The share of the machine that other programs used."""
    if busy_s is None:
        return None
    # The kernel counts in ticks of 10 ms, so a quiet short run can come out just below zero.
    return max(0.0, (busy_s - own_s) / (wall_s * cores()))


def wait_until_idle(limit_s: float, share: float = 0.06, sample_s: float = 2.0) -> None:
    """Wait while other programs are busy, at most `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with Meter() as meter:
            time.sleep(sample_s)
        if (meter.foreign(0.0) or 0.0) < share:
            return


def _busy_s() -> float | None:
    """CPU seconds of all programs since boot."""
    fields = _first_line("/proc/stat").split()[1:9]
    if len(fields) < 8:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
