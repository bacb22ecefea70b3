# SPDX-License-Identifier: Apache-2.0
"""The loop around `Watch`, with real processes."""

import os
import pathlib

import pytest
from tests.launch.processes.test_gang import HERE, Screen

from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.processes import watch
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.processes.logs import claim
from fleetlight.launch.processes.supervise import supervise
from fleetlight.launch.processes.watch import RemoteState

#: worker 1 reports that it is exiting, and exits long after worker 0 failed because of it
SCRIPT = """
import json, os, pathlib, sys, time
index = int(os.environ["FLEET_INDEX"])
def tell(**word):
    pathlib.Path(os.environ["FLEET_ERROR_FILE"]).write_text(json.dumps({"at": 1.0, **word}))
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.001)
os.chdir(os.path.dirname(__file__))
if index == 0:
    wait_for("leaving")
    tell(error="PeerLostError: worker 1 left", caused_by_peer=True)
    sys.exit(1)
tell(exiting=True)
pathlib.Path("leaving").touch()
wait_for("looked")
sys.exit(3)
"""


@pytest.mark.multiprocess
def test_exit_code_of_an_exiting_process_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    monkeypatch.setattr(watch, "EXIT_S", 60.0)
    (tmp_path / "t.py").write_text(SCRIPT)
    node = Node(host=HERE, workers=((HERE, 1), (HERE, 2)), servers=(), master_port=4)
    job = JobSpec(script=str(tmp_path / "t.py"), collective=True)
    run = Run(
        job=job, layout=JobLayout(nodes=(node,)), log_dir=str(tmp_path), error_dir=str(tmp_path)
    )
    logs = claim(str(tmp_path / "log"), "a")
    with Reaper() as reaper, Interrupts() as interrupts:
        gang = Gang(run, folder=logs, reaper=reaper, screen=Screen(), outside=os.environ)
        failures: list[bool] = []

        def ask(_: bool) -> RemoteState:
            failures.extend(bool(one.status) for one in gang.exits())
            if len(failures) == 3:
                (tmp_path / "looked").touch()
            return RemoteState.DONE

        gang.start()
        found = supervise(gang, ask, interrupts)
    logs.close()
    assert found.failure is not None
    assert (found.failure.member.index, found.failure.status) == (1, 3)
