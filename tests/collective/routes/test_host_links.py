# SPDX-License-Identifier: Apache-2.0
"""What a host sends to the others, counted at its cable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cables import ADDRESSES, NEEDED, two_machines
from tests.workers import environment

pytestmark = NEEDED

WORK = """
    import pathlib
    import torch
    import fleetlight as fleet
    from fleetlight.collective.replica import Reduction, reducer_of
    from fleetlight.collective.routes.route import Bucket
    from fleetlight.fleet.context import current

    def sent():
        counters = pathlib.Path("/sys/class/net").glob("cable*/statistics/tx_bytes")
        return sum(int(counter.read_text()) for counter in counters)

    def reduce(reducer, times):
        for _ in range(times):
            bucket = Bucket(0, torch.ones(1 << 20))
            future = reducer.reduce(bucket)
            reducer.finish()
            assert bool((future.wait() == 1).all()) and not reducer.failures
            reducer.stamps()
        fleet.barrier_worker()

    fleet.init(is_collective=True)
    for inner in (None, 0):
        reducer = reducer_of(current().group, Reduction(inner=inner))
        reduce(reducer, 1)
        before = sent()
        reduce(reducer, 4)
        print(round((sent() - before) / (4 << 22), 3))
        reducer.close()
    fleet.stop_worker()
"""


def start(script: Path, index: int, space: str) -> subprocess.Popen[str]:
    env = environment(index, 4, 6170, deadline_s=60) | {"FLEET_MASTER": f"{ADDRESSES[0]}:6170"}
    command = ["ip", "netns", "exec", space, sys.executable, str(script)]
    return subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_host_sends_its_share_whatever_the_order_of_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    lines = WORK.strip("\n").split("\n")
    script.write_text("\n".join(line[4:] for line in lines))
    with two_machines() as spaces:
        # neighbours in the order of the workers are on different hosts
        running = [start(script, index, spaces[index % 2]) for index in range(4)]
        try:
            ended = [process.communicate(timeout=90) for process in running]
        finally:
            for process in running:
                process.kill()
    for process, (output, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors
        flat, levels = map(float, output.split())
        # a ring of four crosses with each of its steps, one of two hosts sends half and half
        assert flat > 2.9
        assert 1.0 <= levels < 1.05
