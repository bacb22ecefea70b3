# SPDX-License-Identifier: Apache-2.0
"""`fleetlight ps`, `logs` and `stop` for a log folder, by records that tests write."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.launch.backends import named
from fleetlight.launch.process_identity import System, start_of, this_system
from fleetlight.launch.processes.record import LauncherRecord, ProcessEntry
from fleetlight.observe.telemetry.recorder import EventFile

Capture = pytest.CaptureFixture[str]

HOST = this_system().hostname
#: above the largest number of a process
NO_PID = 1 << 23
AWAY = System(hostname="node2", boot="b", namespace="n")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").mkdir()


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a launcher."""
    command = [sys.executable, "-S", "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def entry(name: str, **values: Any) -> ProcessEntry:
    return ProcessEntry(**{"name": name, "pid": NO_PID, "start": 0, **values})


def write(*processes: ProcessEntry, **values: Any) -> Path:
    """Write a record, by default of a launcher that was killed."""
    record = LauncherRecord(
        **{
            "job": "j",
            "host": "127.0.0.1",
            "system": this_system(),
            "pid": NO_PID,
            "start": -1,
            "processes": processes,
            **values,
        }
    )
    path = Path(f"log/launcher.{record.host}.{record.pid}.json")
    path.write_bytes(msgspec.json.encode(record))
    return path


def live(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {"pid": process.pid, "start": start_of(process.pid)}


def rows(job: str = "log") -> list[tuple[str, str, str, str]]:
    found = named("processes").control
    assert found is not None
    return [(one.name, one.state, one.where, one.detail) for one in found.status(job)]


def test_ps_shows_the_state_of_each_process(launcher: subprocess.Popen[bytes]) -> None:
    write(
        entry("worker 10", pid=20),
        entry("worker 2", pid=21, status=3),
        entry("worker 1", pid=22, status=-9, restarts=1),
        entry("server 0", pid=23, restarts=2),
        **live(launcher),
    )
    assert rows() == [
        ("launcher", "running", HOST, f"pid {launcher.pid}"),
        ("server 0", "running", HOST, "pid 23, restarts: 2"),
        ("worker 1", "killed by SIGKILL", HOST, "pid 22, restarts: 1"),
        ("worker 2", "ended with code 3", HOST, "pid 21"),
        ("worker 10", "running", HOST, "pid 20"),
    ]


@pytest.mark.parametrize("job", ["log", "./log", "processes:log", "hosts:log"])
def test_a_job_is_its_folder(job: str, launcher: subprocess.Popen[bytes], capfd: Capture) -> None:
    write(entry("worker 0"), **live(launcher))
    assert main(["ps", job]) == 0
    assert capfd.readouterr().out.splitlines()[0].split() == ["process", "state", "machine"]


def test_ps_recognises_a_launcher_that_was_killed(launcher: subprocess.Popen[bytes]) -> None:
    # its number belongs to another process now; one of its processes still runs
    reused = {"pid": launcher.pid, "start": 5}
    write(entry("worker 0", **live(launcher)), entry("worker 1", **reused), **reused)
    assert [(name, state) for name, state, *_ in rows()] == [
        ("launcher", "lost"),
        ("worker 0", "running"),
        ("worker 1", "ended"),
    ]


def test_ps_of_a_job_that_has_ended(launcher: subprocess.Popen[bytes]) -> None:
    write(entry("worker 0", status=1), entry("worker 1"), ended=True, code=1, **live(launcher))
    assert [state for _, state, *_ in rows()] == ["ended with code 1", "ended with code 1", "ended"]


def test_ps_says_what_it_knows_of_other_machines(launcher: subprocess.Popen[bytes]) -> None:
    Path("log/endpoints.log").write_text(
        "job j\nnode 0 10.0.0.1\nserver 0 10.0.0.1:7\nworker 0 10.0.0.1:8\nworker 1 10.0.0.2:8\n"
        "worker 2 ::3:9\n"
    )
    write(entry("server 0", pid=9), host="10.0.0.1", **live(launcher))
    write(entry("worker 1", pid=5), host="10.0.0.2", system=AWAY, pid=4)
    assert rows() == [
        ("launcher of 10.0.0.1", "running", f"{HOST} (10.0.0.1)", f"pid {launcher.pid}"),
        ("launcher of 10.0.0.2", "running", "node2 (10.0.0.2)", "pid 4 (not checked)"),
        ("server 0", "running", f"{HOST} (10.0.0.1)", "pid 9"),
        ("worker 0", "starting", f"{HOST} (10.0.0.1)", ""),
        ("worker 1", "running", "node2 (10.0.0.2)", "pid 5 (not checked)"),
        ("worker 2", "unknown", "::3", "run fleetlight ps there"),
    ]


def test_ps_knows_processes_of_other_machines_by_their_events(
    launcher: subprocess.Popen[bytes],
) -> None:
    names = [f"worker {number}" for number in range(1, 5)]
    rest = "".join(f"{name} 10.0.0.2:{number + 8}\n" for number, name in enumerate(names))
    Path("log/endpoints.log").write_text(f"job j\nworker 0 10.0.0.1:8\n{rest}")
    write(entry("worker 0", pid=9), host="10.0.0.1", **live(launcher))
    folder = Path("log")
    events = EventFile(folder, "fleetrun.10.0.0.2.4", "fleetrun", "10.0.0.2")
    # worker 1 was on another machine before, whose clock is ahead
    former = EventFile(folder, "fleetrun.10.0.0.3.4", "fleetrun", "10.0.0.3", lambda: 9e9)
    former.add("start", "started, pid 3", "worker 1", pid=3)
    former.add("exit", "killed by SIGTERM", "worker 1", status=-15)
    for name, pid in zip(names[:3], (5, 6, 7), strict=True):
        events.add("start", f"started, pid {pid}", name, pid=pid)
    for name, status in (("worker 2", -9), ("worker 3", 0)):
        events.add("exit", "ended", name, status=status)
    events.add("restart", "restart 1, pid 8", "worker 2", pid=8, restart=1)
    shown = rows()
    assert shown[2:] == [
        ("worker 1", "running", "10.0.0.2", "pid 5 (not checked)"),
        ("worker 2", "running", "10.0.0.2", "pid 8 (not checked), restarts: 1"),
        ("worker 3", "ended with code 0", "10.0.0.2", "pid 7 (not checked)"),
        ("worker 4", "unknown", "10.0.0.2", "run fleetlight ps there"),
    ]
    events.add("exit", "killed", "worker 2", status=-9)
    record = Path("log", f"launcher.10.0.0.1.{launcher.pid}.json")
    record.unlink()
    record = write(entry("worker 0", status=0), host="10.0.0.1")
    # the launcher of node 0 was killed: nothing says whether the others have ended
    assert [state for _, state, *_ in rows()[2:4]] == ["unknown", "killed by SIGKILL"]
    record.unlink()
    write(entry("worker 0", status=0), host="10.0.0.1", ended=True, code=0)
    assert [state for _, state, *_ in rows()[2:5]] == [
        "ended",
        "killed by SIGKILL",
        "ended with code 0",
    ]


def test_ps_prefers_the_launcher_that_replaced_a_lost_one(
    launcher: subprocess.Popen[bytes],
) -> None:
    write(entry("worker 0", pid=8))
    write(entry("worker 0", pid=9), **live(launcher))
    assert ("worker 0", "running", HOST, "pid 9") in rows()
    assert len(rows()) == 3


def test_logs_of_all_processes_or_of_one(capfd: Capture) -> None:
    for name in ("serverlog.0", "workerlog.10", "workerlog.2"):
        Path(f"log/{name}").write_text(f"in {name}\nopen line")
    Path("log/endpoints.log").write_text("job j\nworker 3 10.0.0.2:7\n")
    assert main(["logs", "log"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"[{name}] {text}"
        for name, file in (
            ("server 0", "serverlog.0"),
            ("worker 2", "workerlog.2"),
            ("worker 10", "workerlog.10"),
        )
        for text in (f"in {file}", "open line")
    ]
    assert main(["logs", "log", "worker", "2"]) == 0
    assert capfd.readouterr().out == "in workerlog.2\nopen line"
    assert main(["logs", "log", "worker", "3"]) == 1
    assert "log has no log of worker 3, which runs on 10.0.0.2; ask" in capfd.readouterr().err
    assert main(["logs", "log", "worker", "4"]) == 1
    assert "of 'worker 4'; expected one of server 0, worker 2, worker" in capfd.readouterr().err


def test_stop_sends_sigterm_to_the_launcher(
    launcher: subprocess.Popen[bytes], capfd: Capture
) -> None:
    write()
    write(**live(launcher))
    assert main(["stop", "log"]) == 0
    assert launcher.wait() == -signal.SIGTERM
    assert capfd.readouterr().out == "stopping: log\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 5}, "the job in log has ended; nothing to stop"),
        ({"ended": True, "code": 3}, "the job in log has ended with code 3; nothing to stop"),
        (
            {"system": AWAY, "host": "10.0.0.2"},
            "cannot stop the job in log from here: its launcher is process 7 on node2 (10.0.0.2); "
            "run fleetlight stop there",
        ),
    ],
)
def test_stop_signals_no_other_process(
    changes: dict[str, Any],
    message: str,
    launcher: subprocess.Popen[bytes],
    capfd: Capture,
) -> None:
    write(**{**live(launcher), **changes})
    assert main(["stop", "log"]) == 1
    assert message.replace("process 7", f"process {launcher.pid}") in capfd.readouterr().err
    assert launcher.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_stop_signals_no_process_of_another_user_than_the_record(
    launcher: subprocess.Popen[bytes], capfd: Capture
) -> None:
    os.chown(write(**live(launcher)), 12345, 12345)
    assert main(["stop", "log"]) == 1
    assert "which belongs to another user" in capfd.readouterr().err
    assert launcher.poll() is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ps", "log"), "log has no record of a job; expected the folder that fleetrun printed"),
        (("ps", "none/log"), "none/log is no folder; expected the log folder of a job"),
        (("logs", "processes:none"), "none is no folder"),
        (("logs", "log", "worker", "0"), "of 'worker 0'; expected one of none so far"),
        (
            ("scale", "log", "--worker_num", "3"),
            "end it with fleetlight stop log, then start it with other counts and --resume",
        ),
        (("ps", "link"), "launcher.x.1.json cannot be read: "),
    ],
)
def test_wrong_commands_are_refused(words: tuple[str, ...], message: str, capfd: Capture) -> None:
    Path("link").mkdir()
    Path("link/launcher.x.1.json").symlink_to("/dev/null")
    assert main(list(words)) == 1
    assert message in capfd.readouterr().err


def test_follow_ends_with_the_job(launcher: subprocess.Popen[bytes], capfd: Capture) -> None:
    path = write(entry("worker 0"), entry("worker 1"), **live(launcher))
    Path("log/workerlog.0").write_text("one\n[fleet worker 0] two\n")
    Path("log/workerlog.1").write_text("a")
    record = msgspec.json.decode(path.read_bytes(), type=LauncherRecord)
    control = named("processes").control
    assert control is not None
    assert not any(state.is_over for state in control.status("log"))
    assert b"".join(control.logs("log", "worker 0", 4)) == b"[fleet worker 0] two\n"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, ended=True, code=0)))
    assert main(["logs", "-f", "log"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "[worker 0] one",
        "[fleet worker 0] two",
        "[worker 1] a",
    ]
