# SPDX-License-Identifier: Apache-2.0
"""The machine of a benchmark, and the load by other programs during it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import ssl
import time
from pathlib import Path
from types import TracebackType


def describe() -> dict[str, str]:
    """The properties of this machine that matter for figures."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "CPU": _cpu_model(),
        "cores": str(cores()),
        "memory": f"{pages / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "PyTorch": _version("torch"),
        "OpenSSL": ssl.OPENSSL_VERSION,
        "congestion control": _first_line("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_s() -> float | None:
    """CPU seconds of all programs since boot; None if the system does not count them."""
    fields = _first_line("/proc/stat").split()[1:9]
    if len(fields) < 8:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def foreign_share(wall_s: float, busy: float | None, own_s: float) -> float | None:
    """The share of the machine that other programs used."""
    if busy is None:
        return None
    # The kernel counts in ticks of 10 ms, so a quiet short run can come out just below zero.
    return max(0.0, (busy - own_s) / (wall_s * cores()))


class Meter:
    """Wall time and the whole machine's CPU time between entry and exit."""

    wall_s: float
    busy_s: float | None

    def __enter__(self) -> Meter:
        self._busy_before = busy_s()
        self._before = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.wall_s = time.perf_counter() - self._before
        before, now = self._busy_before, busy_s()
        self.busy_s = None if before is None or now is None else now - before


def wait_until_idle(limit_s: float, share: float = 0.06, sample_s: float = 2.0) -> None:
    """Wait while other programs are busy, at most `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with Meter() as meter:
            time.sleep(sample_s)
        if (foreign_share(meter.wall_s, meter.busy_s, own_s=0.0) or 0.0) < share:
            return


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
