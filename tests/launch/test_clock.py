# SPDX-License-Identifier: Apache-2.0
"""A machine whose wall clock jumps while a job runs."""

import os
from pathlib import Path

import pytest
from tests.launch.workplace import Workplace

#: Python imports it first, in fleetrun and in its processes
JUMPING = """
import os, random
from tests.chaos import harms
harms.come_over(["clock"], str(os.getpid()))
"""
SCRIPT = """
import os, pathlib, sys, time
me = os.environ["FLEET_INDEX"]
died = pathlib.Path("died")
for number in range(30):
    print(me, "line", number, time.time(), flush=True)
    time.sleep(0.02)
    if me == "1" and number == 10 and not died.exists():
        died.touch()
        sys.exit(3)
"""


@pytest.mark.slow
def test_output_and_restarts_do_not_use_the_wall_clock(place: Workplace) -> None:
    """Deadlines use the monotonic clock."""
    site = place.path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(JUMPING)
    root = Path(__file__).parents[2]
    known = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([str(site), str(root), *filter(None, [known])])
    flags = ["--tee", "--nproc_per_node", "2", "--max_restarts", "2"]
    code, output = place.run(*flags, place.script(SCRIPT), PYTHONPATH=paths)
    assert code == 0, output
    assert "exited with code 3" in output
    assert "Errno" not in output
    for worker in range(2):
        assert f"[worker {worker}] {worker} line 29 " in output
