# SPDX-License-Identifier: Apache-2.0
"""The loop around `Watch`, with real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.processes.test_gang import HERE, Screen

from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.processes import reaper, watch
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.interrupts import Interrupted, Interrupts
from fleetlight.launch.processes.logs import claim
from fleetlight.launch.processes.reaper import keep, kill
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# -- interrupts are recorded


def test_signals_are_recorded_in_order_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.seen == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
            interrupts.check()
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_asks_newcomers_to_leave() -> None:
    with Interrupts(asks_to_end=True) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.seen == [signal.SIGTERM]


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.seen == []
    finally:
        signal.signal(signal.SIGHUP, before)


# -- the reaper, which kills process groups and removes folders


def test_reaper_keeps_added_groups() -> None:
    assert keep([b"add 5\n", b"add 6\n", b"drop 5\n", b"drop 9\n"]) == {6}


def test_ended_group_is_no_error() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    kill([process.pid])


def test_reaper_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "error.0").write_text("{}")
    program = [sys.executable, "-I", "-S", reaper.__file__]
    for _ in range(2):  # the second time the folder does not exist
        subprocess.run([*program, str(folder)], input=b"", timeout=60, check=True)
        assert not folder.exists()
    subprocess.run(program, input=b"", timeout=60, check=True)
    assert tmp_path.exists()


def test_reaper_kills_the_groups_when_the_pipe_closes() -> None:
    stay, go = (
        subprocess.Popen(["sleep", "60"], start_new_session=True),
        subprocess.Popen(["sleep", "60"], start_new_session=True),
    )
    orders = f"add {stay.pid}\nadd {go.pid}\ndrop {stay.pid}\n"
    subprocess.run(
        [sys.executable, "-I", "-S", reaper.__file__], input=orders.encode(), timeout=60, check=True
    )
    assert go.wait(timeout=60) == -9
    assert stay.poll() is None
    stay.kill()
    stay.wait(timeout=60)
