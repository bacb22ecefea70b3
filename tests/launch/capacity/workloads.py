# SPDX-License-Identifier: Apache-2.0
"""A workload with round numbers, for tests of what uses one."""

from __future__ import annotations

import msgspec

from fleetlight.launch.capacity.profile import (
    FORMAT,
    SYNC,
    Lane,
    Line,
    MachineFacts,
    Profile,
    Workload,
)

HERE = MachineFacts(cpu="here", cores=2, python="3.11.7", torch="2.13.0", fleetlight="0.1.0")


def workload(mode: str = SYNC, **changed: object) -> Workload:
    """A step of 20 ms in the worker and 2 ms in the server, that moves 2 MB in each direction."""
    push = Lane(sent=Line(1e6), received=Line(1e6), overlaps=mode != SYNC, round_trips=1)
    work = Workload(
        mode=mode,
        batch=100.0,
        worker_cpu_s=Line(0.020),
        server_cpu_s=Line(0.002),
        idle_s=0.0,
        spread=0.0,
        lanes={
            "pull": Lane(sent=Line(1e6), received=Line(1e6), overlaps=False, round_trips=2),
            "push": push,
        },
        connections=4,
        rows=1000,
        row_bytes=100.0,
        server_bytes=1e6,
        worker_bytes=1e6,
    )
    return msgspec.structs.replace(work, **changed)


def profile(
    machine: MachineFacts = HERE, work: Workload | None = None, other_programs: float = 0.0
) -> Profile:
    """The profile of such a workload."""
    return Profile(
        format=FORMAT,
        command=["train.py"],
        machine=machine,
        other_programs=other_programs,
        workload=work or workload(),
    )
