# SPDX-License-Identifier: Apache-2.0
"""`fleetlight ps`, `logs` and `stop` of real jobs on this machine."""

import signal
from pathlib import Path

import pytest
from tests.launch.conftest import place as place
from tests.launch.workplace import SAVING, Workplace, free_ports, is_running, wait_until

from fleetlight.cli.fleetlight import main
from fleetlight.launch.backends import named

pytestmark = pytest.mark.multiprocess

#: says its process id once; worker 1 fails at its first start
WORK = """
    import os, pathlib, time
    index, restart = os.environ["FLEET_INDEX"], os.environ["FLEET_RESTART"]
    if index == "1" and restart == "0":
        raise SystemExit(3)
    print("I am", index, flush=True)
    pathlib.Path(f"pid.{index}.{restart}").write_text(f"{os.getpid()}\\n")
    time.sleep(600)
"""


def states(folder: Path) -> dict[str, tuple[str, str]]:
    """State and detail of each process, as `fleetlight ps` shows them."""
    control = named("processes").control
    assert control is not None
    return {one.name: (one.state, one.detail) for one in control.status(str(folder))}


def test_ps_logs_and_stop_of_a_job(place: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    log = place.path / "log"
    job = place.start("--nproc_per_node", "2", "--max_restarts", "1", place.script(WORK))
    pids = [int(place.wait_for(f"pid.{index}.1")) for index in (0, 1)]
    running = {
        "launcher": ("running", f"pid {job.process.pid}"),
        "worker 0": ("running", f"pid {pids[0]}, restarts: 1"),
        "worker 1": ("running", f"pid {pids[1]}, restarts: 1"),
    }
    wait_until(lambda: states(log) == running, "the record of the second start")
    assert main(["logs", str(log), "worker", "1"]) == 0
    assert capfd.readouterr().out == "--- restart 1 ---\nI am 1\n"
    assert main(["stop", str(log)]) == 0
    code, output = job.end()
    assert code == 143, output
    assert not any(map(is_running, pids))
    assert states(log) == {
        "launcher": ("ended with code 143", f"pid {job.process.pid}"),
        "worker 0": ("killed by SIGTERM", f"pid {pids[0]}, restarts: 1"),
        "worker 1": ("killed by SIGTERM", f"pid {pids[1]}, restarts: 1"),
    }
    assert main(["stop", str(log)]) == 1
    assert "has ended with code 143" in capfd.readouterr().err


def test_stop_saves_a_job_with_a_checkpoint(place: Workplace) -> None:
    flags = ("--server_num", "1", "--worker_num", "1", "--checkpoint", "ckpt", "--grace_s", "50")
    job = place.start(*flags, place.script(SAVING))
    for name in ("server", "worker"):
        place.wait_for(f"pid.{name}")
    assert main(["stop", str(place.path / "log")]) == 0
    code, output = job.end()
    assert code == 75, output
    assert states(place.path / "log")["worker 0"][0] == "ended with code 75"


def test_a_killed_launcher_is_recognised(place: Workplace) -> None:
    job = place.start("--nproc_per_node", "1", place.script(WORK))
    pid = int(place.wait_for("pid.0.0"))
    job.process.send_signal(signal.SIGKILL)
    job.end()
    wait_until(lambda: not is_running(pid), "the end of the worker")
    found = {name: state for name, (state, _) in states(place.path / "log").items()}
    assert found == {"launcher": "lost", "worker 0": "ended"}
    assert main(["stop", str(place.path / "log")]) == 1


def test_stop_on_one_host_ends_the_job_on_all(place: Workplace) -> None:
    hosts = ("127.0.0.1", "127.0.0.2")
    script = place.script(WORK.replace('index == "1" and restart == "0"', "False"))
    port = free_ports(hosts, 6)
    flags = ("--nnodes", "2", "--master", f"{hosts[0]}:{port}", "--nproc_per_node", "1")
    jobs = [
        place.start(*flags, "--rank", str(rank), "--host", host, "--log_dir", f"log{rank}", script)
        for rank, host in enumerate(hosts)
    ]
    for index in (0, 1):
        place.wait_for(f"pid.{index}.0")
    logs = [place.path / f"log{rank}" for rank in (0, 1)]
    for rank, log in enumerate(logs):
        wait_until(lambda log=log, rank=rank: states(log)[f"worker {rank}"][1] != "", "the record")
        assert states(log)[f"worker {rank}"][0] == "running"
    # other launchers send their events to node 0 alone
    assert states(logs[1])["worker 0"] == ("unknown", "run fleetlight ps there")
    wait_until(lambda: states(logs[0])["worker 1"][0] == "running", "the events of node 1")
    assert main(["stop", f"hosts:{logs[1]}"]) == 0
    assert [job.end()[0] for job in jobs] == [143, 143]
    assert states(logs[1])["launcher"][0] == "ended with code 143"
