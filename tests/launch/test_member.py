# SPDX-License-Identifier: Apache-2.0
"""`fleetlight member`: one process of a job that an engine starts."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.launch.workplace import is_running, wait_until

from fleetlight.cli.fleetlight import main
from fleetlight.errors import ConfigError
from fleetlight.launch import inventory
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.member import exit_code, may_restart
from fleetlight.launch.process_identity import Presence, presence, send, start_of, this_system
from fleetlight.launch.processes.failure import ProcessExit
from fleetlight.launch.status import ProcessStatus, Stop
from fleetlight.roles import address
from fleetlight.roles.role import Kind

MEMBER = JobProcess(kind=Kind.WORKER, index=0, of=2, local_rank=0, local_size=1)
SAVED = {"stopped": Stop(7, "ckpt"), "exiting": True}
GONE = {"left_job": True, "exiting": True}


def exit_of(status: int, **reported: Any) -> ProcessExit:
    return ProcessExit.of(MEMBER, status, ProcessStatus(**reported), 1.0)


@pytest.mark.parametrize(
    ("status", "reported", "code"),
    [
        (0, {}, 0),
        (3, {}, 3),
        (1, {"error": "x"}, 1),
        # the code was lost, as with os._exit(1)
        (1, {"error": "x", "permanent": True}, 78),
        (1, {"error": "x", "caused_by_peer": True}, 69),
        (75, SAVED, 75),
        (75, {}, 75),
        # killed after the save, or after the script
        (-9, SAVED, 75),
        (-9, GONE, 0),
        (-9, {"error": "x", "caused_by_peer": True}, 137),
        (-15, {}, 143),
    ],
)
def test_exit_code(status: int, reported: dict[str, Any], code: int) -> None:
    assert exit_code(exit_of(status, **reported)) == code


@pytest.mark.parametrize(
    ("status", "reported", "with_others", "alone"),
    [
        (-9, {"restartable": True}, True, True),
        (-9, {}, False, True),
        (1, {"restartable": True}, False, True),
        (69, {}, False, True),
        (1, {"permanent": True}, False, False),
        (78, {}, False, False),
        (75, SAVED, False, False),
        (-9, SAVED, False, False),
        (-9, GONE, False, False),
        (0, {}, False, False),
        (3, {}, False, False),
    ],
)
def test_restarts(status: int, reported: dict[str, Any], with_others: bool, alone: bool) -> None:
    exit_ = exit_of(status, **reported)
    assert may_restart(exit_, has_others=True) == with_others
    assert may_restart(exit_, has_others=False) == alone


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ([], 78, "got no command"),
        (["--"], 78, "got no command"),
        (["--restarts", "-1", "true"], 78, "expected 0 or more"),
        (["./absent.py"], 127, "no such file in"),
        (["no-such-program"], 127, "not in PATH"),
        (["./train.py"], 126, "fleetlight member -- python ./train.py"),
        (["./empty"], 126, "cannot start ./empty"),
    ],
)
def test_wrong_command(
    words: list[str],
    code: int,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch(0o644)
    (tmp_path / "empty").write_text("no interpreter")
    (tmp_path / "empty").chmod(0o755)
    assert main(["member", *words]) == code
    printed, error = capfd.readouterr()
    assert not printed
    assert error.startswith("fleetlight: error: ")
    assert why in error


#: the variables of another job must not reach the tests
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("FLEET_") and name != "OMP_NUM_THREADS"
}


def member(tmp_path: Path, script: str, *flags: str, **env: str) -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    shim = [sys.executable, "-m", "fleetlight", "member", *flags, "--"]
    return subprocess.Popen(
        [*shim, sys.executable, "train.py"],
        cwd=tmp_path,
        env={**CLEAN, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WORKER = {"FLEET_ROLE": "worker", "FLEET_INDEX": "1", "FLEET_WORKER_NUM": "2"}
WORKER |= {"FLEET_MASTER": "127.0.0.1:1"}


def lines_of(job: subprocess.Popen[str]) -> tuple[str, list[str]]:
    printed, error = job.communicate(timeout=60)
    return printed, [line for line in error.splitlines() if line.startswith("fleetlight: ")]


def test_command_gets_defaults_and_keeps_its_role(tmp_path: Path) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    outside = {**WORKER, "https_proxy": "http://x", "TORCH_CPP_LOG_LEVEL": "INFO"}
    printed, lines = lines_of(member(tmp_path, script, FLEET_LOCAL_SIZE="100000", **outside))
    found: Mapping[str, str] = json.loads(printed)
    assert {name: found[name] for name in WORKER} == WORKER
    assert found["OMP_NUM_THREADS"] == found["PYTHONUNBUFFERED"] == "1"
    assert found["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert "https_proxy" not in found
    assert not os.path.exists(os.path.dirname(found["FLEET_ERROR_FILE"]))
    assert len(lines) == 1
    assert lines[0].startswith("fleetlight: done: worker 1 of 2 exited with code 0 after ")


REPORTING = """
    import json, os, pathlib, signal, sys, time
    def report(**status):
        pathlib.Path(os.environ["FLEET_ERROR_FILE"]).write_text(json.dumps({"at": 0.0, **status}))
    def ready():
        print("ready", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "ending", "code", "what"),
    [
        (signal.SIGTERM, "report(stopped={'step': 7, 'folder': 'ckpt'}); sys.exit(75)", 75, "stop"),
        (signal.SIGUSR1, "report(error='E: x', permanent=True); sys.exit(1)", 78, "failed"),
        (signal.SIGINT, "os.kill(os.getpid(), 9)", 137, "failed"),
    ],
)
def test_signals_reach_the_command(
    number: signal.Signals, ending: str, code: int, what: str, tmp_path: Path
) -> None:
    script = f"""{REPORTING}
    def end(number, frame):
        {ending}
    signal.signal({int(number)}, end)
    ready()
    while True:
        signal.pause()
    """
    log = tmp_path / "log"
    # the signal of a stop prevents a restart
    flags = ["--restarts", "3"] if number is signal.SIGINT else []
    job = member(tmp_path, script, *flags, FLEET_TERMINATION_LOG=str(log))
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    _, [line] = lines_of(job)
    assert job.returncode == code, line
    lines = {
        75: "worker 0 of 1 stopped at step 7, saved in ckpt; to resume",
        78: "failed: worker 0 of 1 exited with code 1 after",
        137: "failed: worker 0 of 1 was killed by SIGKILL",
    }
    assert line.startswith(f"fleetlight: {lines[code]}")
    assert ("E: x" in line) == (code == 78)
    # this script does not write the log itself; one that is killed cannot
    assert log.exists() == (code == 137)


def test_command_ends_with_a_killed_shim(tmp_path: Path) -> None:
    script = f"""{REPORTING}
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
    """
    job = member(tmp_path, script)
    assert job.stdout is not None
    pids = [int(word) for word in job.stdout.readline().split()]
    assert all(map(is_running, pids))
    job.kill()
    wait_until(lambda: not any(map(is_running, pids)), "the command and its child to end")
    job.communicate(timeout=60)


RESTARTED = f"""{REPORTING}
    count = len(list(pathlib.Path().glob("ran.*")))
    pathlib.Path(f"ran.{{count}}").write_text(os.environ.get("FLEET_RESTART", ""))
    if count == 0:
        report(restartable=True, saves_at_sigterm=True)
        os.kill(os.getpid(), 9)
    status = json.loads(pathlib.Path(os.environ["FLEET_ERROR_FILE"]).read_text())
    assert "saves_at_sigterm" not in status
    sys.exit(3)
"""


def test_restartable_command_restarts_here(tmp_path: Path) -> None:
    job = member(tmp_path, RESTARTED, "--restarts", "5", FLEET_RESTART="2", **WORKER)
    _, lines = lines_of(job)
    assert job.returncode == 3
    assert lines[0] == (
        "fleetlight: worker 1 of 2 was killed by SIGKILL (often: out of memory); restarting it "
        "(restart 1, 4 left), the others continue"
    )
    assert [line.partition(" after")[0] for line in lines[1:]] == [
        "fleetlight: failed: worker 1 of 2 exited with code 3"
    ]
    assert [file.read_text() for file in sorted(tmp_path.glob("ran.*"))] == ["2", "2"]


def test_a_job_of_one_process_resumes_what_it_has_saved(tmp_path: Path) -> None:
    script = """
    import os, pathlib, signal
    first = pathlib.Path("first")
    print(os.environ.get("FLEET_RESUME", "begins"), flush=True)
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    printed, _ = lines_of(member(tmp_path, script, "--restarts", "1"))
    assert printed.split() == ["begins", "auto"]


# -- the inventory of real and simulated machines


LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables")


def test_cores_follow_the_cpu_affinity() -> None:
    assert 1 <= inventory.cores() <= (os.cpu_count() or 1)


def test_container_limit_reduces_the_cores(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("250000 100000\n")
    assert inventory._cpu_limit(file) == 2
    file.write_text("max 100000\n")
    assert inventory._cpu_limit(file) is None
    assert inventory._cpu_limit(tmp_path / "none") is None


@LINUX_ONLY
def test_loopback_interface_is_found() -> None:
    assert inventory.this_machine({}).interface("127.0.0.2") == "lo"


def test_gpus_are_counted_by_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "dev").mkdir()
    assert inventory.gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert inventory.gpus({}, tmp_path) == 2
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert inventory.gpus({}, tmp_path) == 1


def test_driver_tool_counts_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: B'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert inventory.gpus({}, tmp_path) == 2


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("1", 1), ("0,1", 2), ("-1", 0)])
def test_hidden_gpus_do_not_count(tmp_path: Path, visible: str, count: int) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2"):
        (tmp_path / "dev" / name).touch()
    assert inventory.gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == count


def test_own_addresses_are_recognized() -> None:
    own = Machine(addresses=(("lo", "127.0.0.1"), ("eth0", "10.0.0.1")))
    assert own.owns("10.0.0.1")
    assert own.owns("127.0.0.9")
    assert not own.owns("10.0.0.10")
    assert not Machine(addresses=(("eth0", "10.0.0.10"),)).owns("10.0.0.1")
    assert own.interface("10.0.0.1") == "eth0"
    assert own.interface("10.0.0.7") is None
    assert own.outside_addresses == ["10.0.0.1"]


def test_names_are_resolved() -> None:
    own = Machine(addresses=(("eth0", "10.0.0.1"),), resolve={"me": "10.0.0.1"}.__getitem__)
    assert own.owns("me")


def test_route_to_loopback_is_loopback() -> None:
    assert inventory.route("127.0.0.1") == "127.0.0.1"


def test_missing_route_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "find_route", lambda host: None)
    with pytest.raises(
        ConfigError, match=r"no route from this machine to 198\.51\.100\.1; .*--host"
    ):
        inventory.route("198.51.100.1")


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot resolve host 'no\.such\.invalid'"):
        inventory.resolve("no.such.invalid")


def test_version_of_a_missing_package() -> None:
    assert inventory.version_of("no-such-package-anywhere") == "not installed"


# -- A process is found again by its number and start, and no other one gets a signal


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_has_one_start(child: subprocess.Popen[bytes]) -> None:
    start = start_of(child.pid)
    assert start is not None
    assert start == start_of(child.pid)
    own = start_of(os.getpid())
    assert own is not None
    assert own < start
    assert presence(child.pid, start, this_system()) is Presence.RUNNING


def test_a_process_that_has_ended_is_gone_before_it_is_reaped(
    child: subprocess.Popen[bytes],
) -> None:
    start = start_of(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_of(child.pid) == start
    assert not send(signal.SIGTERM, child.pid, start, os.getuid())
    assert presence(child.pid, start, this_system()) is Presence.ENDED
    child.wait()
    assert start_of(child.pid) is None
    assert presence(child.pid, start, this_system()) is Presence.ENDED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Presence.RUNNING),
        ({"hostname": "other", "boot": "b"}, Presence.UNKNOWN),
        ({"namespace": "pid:[1]"}, Presence.UNKNOWN),
        ({"boot": "an earlier one"}, Presence.ENDED),
    ],
)
def test_a_number_is_valid_on_its_system(changes: dict[str, str], expected: Presence) -> None:
    system = msgspec.structs.replace(this_system(), **changes)
    pid = os.getpid()
    assert presence(pid, start_of(pid), system) is expected


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    pid, start = os.getpid(), start_of(os.getpid())
    assert start is not None
    assert presence(pid, start - 1, this_system()) is Presence.ENDED
    assert presence(pid, None, this_system()) is Presence.UNKNOWN


def no_descriptors(pid: int) -> int:
    raise OSError(errno.ENOSYS, "no such call")


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_signal_reaches_only_the_process_that_is_meant(
    has_descriptors: bool, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", no_descriptors)
    start, user = start_of(child.pid), os.getuid()
    assert start is not None
    assert not send(signal.SIGTERM, child.pid, start - 1, user)
    assert not send(signal.SIGTERM, child.pid, None, user)
    assert not send(signal.SIGTERM, child.pid, start, user + 1)
    # SIGTERM would have killed the process before; a job of a shell's background ignores SIGINT
    assert send(signal.SIGUSR1, child.pid, start, user)
    assert child.wait() == -signal.SIGUSR1
    assert not send(signal.SIGTERM, child.pid, start, user)
