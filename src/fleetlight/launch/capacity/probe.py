# SPDX-License-Identifier: Apache-2.0
"""Measure a script by two short jobs on this machine: with one server, and with several.

Servers listen at another loopback address than the worker's, so that the two exchange messages
through TCP, as on two hosts, and not in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from fleetlight.errors import DeadlineError, LaunchError
from fleetlight.launch import inventory
from fleetlight.launch.capacity.profile import FORMAT, MachineFacts, Profile
from fleetlight.launch.capacity.samples import (
    COUNTED_S,
    COUNTED_STEPS,
    WARM_S,
    Observed,
    ServerSample,
    WorkerSample,
    other_programs,
    workload_of,
)
from fleetlight.launch.job.token import VARIABLE
from fleetlight.launch.processes.ports import reserve

Say = Callable[[str], None]
S = TypeVar("S")
#: servers of the second job: the costs of other numbers are on the line through both. More of them
#: than cores would take the cores from each other, which servers on hosts of their own do not.
_FEWEST, _MOST = 2, 4
_SERVER_HOST, _WORKER_HOST = "127.0.0.2", "127.0.0.1"
_MODULE = "fleetlight.fleet.probed_script"
_LOOK_EVERY_S = 0.2
#: how long fleetrun may take to end a job
_END_S = 30.0


def measure(command: Sequence[str], deadline_s: float, say: Say) -> Profile:
    """The profile of a script with its arguments; `deadline_s` bounds each of the two jobs."""
    observed = []
    for servers in (1, min(_MOST, max(_FEWEST, inventory.cores()))):
        counted = "1 server" if servers == 1 else f"{servers} servers"
        say(f"measuring {Path(command[0]).name} with 1 worker and {counted}")
        observed.append(_observe(command, servers, deadline_s))
    return Profile(
        format=FORMAT,
        command=list(command),
        machine=this_machine(),
        other_programs=other_programs(observed, inventory.cores()),
        workload=workload_of(observed[0], observed[1]),
    )


def this_machine() -> MachineFacts:
    """The machine that this runs on."""
    return MachineFacts(
        cpu=_cpu(),
        cores=inventory.cores(),
        python=platform.python_version(),
        torch=inventory.version_of("torch"),
        fleetlight=inventory.version_of("fleetlight"),
    )


def _cpu(file: Path = Path("/proc/cpuinfo")) -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _observe(command: Sequence[str], servers: int, deadline_s: float) -> Observed:
    """Run a job until its processes have written enough samples."""
    with tempfile.TemporaryDirectory() as name, _job(command, servers, Path(name)) as job:
        end = time.monotonic() + deadline_s
        while True:
            # it may end between the last samples and this look
            has_ended = job.poll() is not None
            observed = _samples(Path(name), servers)
            if observed.window() is not None:
                return observed
            if has_ended:
                raise LaunchError(_ended_early(observed, Path(name)))
            if time.monotonic() > end:
                raise DeadlineError(
                    f"the probe made {_steps(observed)} in {deadline_s:g} s, expected at least "
                    f"{COUNTED_STEPS} after its start; give it more time with --deadline_s, or a "
                    "smaller batch"
                )
            time.sleep(_LOOK_EVERY_S)


@contextlib.contextmanager
def _job(command: Sequence[str], servers: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    # fleetrun reserves the ports itself
    *of_servers, own = _free_ports([_SERVER_HOST] * servers + [_WORKER_HOST])
    argv = [sys.executable, "-m", "fleetlight.launch", "--servers", ",".join(of_servers)]
    argv += ["--workers", own, "--log_dir", str(folder / "log")]
    argv += ["-m", _MODULE, str(folder), *command]
    with (folder / "fleetrun").open("wb") as output:
        job = subprocess.Popen(
            argv,
            # no other process of this machine can join
            env={VARIABLE: secrets.token_hex(), **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield job
        finally:
            _end(job)


def _free_ports(hosts: Sequence[str]) -> list[str]:
    """Different endpoints, free now."""
    held = [reservation for host in hosts for reservation in reserve(host, 1)]
    for reservation in held:
        reservation.close()
    return [f"{host}:{one.port}" for host, one in zip(hosts, held, strict=True)]


def _end(job: subprocess.Popen[bytes]) -> None:
    """End fleetrun, which ends the processes of its job."""
    if job.poll() is None:
        job.send_signal(signal.SIGTERM)
    try:
        job.wait(_END_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _samples(folder: Path, servers: int) -> Observed:
    return Observed(
        _read(folder / "worker0", WorkerSample),
        [_read(folder / f"server{index}", ServerSample) for index in range(servers)],
    )


def _read(path: Path, kind: type[S]) -> list[S]:
    """The samples of a process; the last line may not be whole yet."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=kind) for line in lines]


def _ended_early(observed: Observed, folder: Path) -> str:
    lines = (folder / "fleetrun").read_text(errors="replace").strip().splitlines()
    ends = ("fleetrun: done", "fleetrun: failed", "fleetrun: error")
    said = next((line for line in reversed(lines) if line.startswith(ends)), "no output")
    if not said.startswith("fleetrun: done"):
        return f"the script failed as a job with servers: {said}"
    return (
        f"the script ended early: the probe saw {_steps(observed)}, expected at least "
        f"{COUNTED_STEPS} steps and {WARM_S + COUNTED_S:g} s of training with parameter servers; "
        "give it more records or epochs"
    )


def _steps(observed: Observed) -> str:
    steps = observed.worker[-1].steps if observed.worker else 0
    return f"{steps} step{'s' * (steps != 1)}"
