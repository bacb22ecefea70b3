# SPDX-License-Identifier: Apache-2.0
"""The failure that a job reports: cause, certainty and text."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.workplace import free_ports, is_running, wait_until

import fleetlight
from fleetlight.errors import LaunchError
from fleetlight.launch.exit_codes import RESUME_CODE, exit_code
from fleetlight.launch.job.layout import JobLayout, JobProcess, Node
from fleetlight.launch.process_identity import start_of, this_system
from fleetlight.launch.processes import record as module
from fleetlight.launch.processes.child import Child, Reaper
from fleetlight.launch.processes.failure import (
    JobFailure,
    ProcessExit,
    failure_of,
    first_failure,
    first_of_all,
    how,
    last_error,
    last_traceback,
)
from fleetlight.launch.processes.logs import FileFollower, claim, tail
from fleetlight.launch.processes.ports import Reservation, listen, listener, reserve
from fleetlight.launch.processes.record import ProcessEntry, RecordFile, changes, read_records
from fleetlight.launch.status import ProcessStatus, Stop
from fleetlight.observe.telemetry.history import History
from fleetlight.roles.role import Kind


def exit_of(index: int, status: int, at: float, **more: object) -> ProcessExit:
    member = JobProcess(kind=Kind.WORKER, index=index, of=4, local_rank=index, local_size=4)
    return ProcessExit(member=member, status=status, at=at, reported=ProcessStatus(**more))  # type: ignore[arg-type]


def test_earliest_failure_is_reported() -> None:
    exits = [exit_of(0, 0, 1), exit_of(1, 1, 3), exit_of(2, 5, 2)]
    found = first_failure(exits)
    assert found is not None
    assert found.member.index == 2
    assert first_failure(exits[:1]) is None


def test_cause_is_preferred_to_its_consequence() -> None:
    found = first_failure([exit_of(0, 1, 1, caused_by_peer=True), exit_of(1, 1, 2)])
    assert found is not None
    assert found.member.index == 1


def test_process_killed_from_outside_is_the_cause() -> None:
    exits = [exit_of(0, 1, 1), exit_of(1, -signal.SIGKILL, 2), exit_of(2, -signal.SIGABRT, 0)]
    found = first_failure(exits)
    assert found is not None
    assert found.member.index == 1


def test_stop_needs_the_exit_code_and_a_status() -> None:
    member = exit_of(0, 0, 0).member
    reported = ProcessStatus(exiting=True, stopped=Stop(7, "/c"))
    # a process killed after it reported its stop has saved
    for status in (RESUME_CODE, -signal.SIGKILL):
        assert ProcessExit.of(member, status, reported, 1.0).stop == Stop(7, "/c")
    # a script may use code 75 for itself
    assert ProcessExit.of(member, RESUME_CODE, ProcessStatus(exiting=True), 1.0).stop is None
    for status in (1, -signal.SIGABRT):
        assert ProcessExit.of(member, status, reported, 1.0).stop is None


def test_exit_has_the_time_of_its_error() -> None:
    member = exit_of(0, 0, 0).member
    assert ProcessExit.of(member, 1, ProcessStatus(at=2.5, error="E: x"), seen_at=3.0).at == 2.5
    assert ProcessExit.of(member, 1, ProcessStatus(at=2.5), seen_at=3.0).at == 3.0


def test_certain_causes() -> None:
    assert exit_of(0, -signal.SIGKILL, 0).is_root_cause
    assert exit_of(0, 1, 0, error="ValueError: x").is_root_cause
    assert not exit_of(0, 1, 0, error="PeerError: x", caused_by_peer=True).is_root_cause
    assert not exit_of(0, 1, 0).is_root_cause
    assert not exit_of(0, -signal.SIGABRT, 0).is_root_cause


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (3, 3, "exited with code 3"),
        (-9, 137, "was killed by SIGKILL (often: out of memory)"),
        (-11, 139, "was killed by SIGSEGV (a crash in native code)"),
        (-15, 143, "was killed by SIGTERM"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_status_as_text(status: int, code: int, text: str) -> None:
    assert exit_code(status) == code
    assert how(status) == text


@pytest.mark.parametrize(
    ("status", "log", "error"),
    [
        (3, "step\nno data\n", "last line: no data"),
        (3, "", ""),
        (3, "no data\n[fleet worker 0] saved ckpt at step 3\n", ""),
        (-signal.SIGKILL, "step\nno data\n", ""),
        (-signal.SIGABRT, "step\nfree(): invalid pointer\n", "last line: free(): invalid pointer"),
        (-signal.SIGABRT, "terminate called after x\n  what(): y\n", "terminate called after x"),
    ],
)
def test_last_line_of_the_log_is_not_the_cause_of_a_signal(
    status: int, log: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(log)
    assert failure_of(exit_of(1, status, 0), tmp_path / "log", after_s=1.0).error == error


def test_exit_code_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step\n")
    one = exit_of(1, 3, 0, error="exited with code 3")
    assert str(failure_of(one, tmp_path / "log", after_s=1.0)).count("exited with code 3") == 1


def test_permanent_error_causes_no_restart(tmp_path: Path) -> None:
    for permanent in (False, True):
        one = exit_of(1, 3, 0, error="E: x", permanent=permanent)
        assert failure_of(one, tmp_path / "log", after_s=1.0).may_restart is not permanent


def test_code_of_a_permanent_error_causes_no_restart(tmp_path: Path) -> None:
    """A script may end with sys.exit(78) itself."""
    found = [failure_of(exit_of(1, code, 0), tmp_path / "log", after_s=1.0) for code in (78, 1)]
    assert [one.may_restart for one in found] == [False, True]


def test_failure_as_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workerlog.1").write_text("ValueError: from the log\n")
    log = tmp_path / "workerlog.1"
    reported = failure_of(exit_of(1, 3, 0), log, after_s=2.04, node="node 1 (h)")
    assert str(reported) == (
        "node 1 (h): worker 1 of 4 exited with code 3 after 2.0 s: ValueError: from the log "
        "(log: workerlog.1)"
    )
    reported = failure_of(exit_of(1, 3, 0, error="E: its own\nwords"), log, after_s=2.04)
    assert "E: its own words" in str(reported)
    assert JobFailure(**json.loads(json.dumps(dataclasses.asdict(reported)))) == reported


def test_failure_of_several_machines_is_the_cause() -> None:
    effect = JobFailure(what="a", code=1, consequence=True)
    cause = JobFailure(what="b", code=1)
    killed = JobFailure(what="c", code=137, killed=True)
    assert first_of_all([effect, cause]) is cause
    assert first_of_all([effect, cause, killed]) is killed
    assert first_of_all([]) is None


PACKAGE = Path(fleetlight.__file__).parent

TRACEBACK = """step 1
Traceback (most recent call last):
  File "t.py", line 1, in f
    g()
my.module.Broken: no more   data

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "t.py", line 2, in <module>
    f()
ValueError: second
goodbye
"""

STACKS = """\
Thread 0x00007f01 (most recent call first):
  File "threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
  File "train.py", line 9 in <module>

Extension modules: numpy, torch (total: 2)
"""
NO_STACK = """\
Current thread 0x00007f02 (most recent call first):
  <no Python frame>
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (TRACEBACK, "ValueError: second"),
        (TRACEBACK.partition("During")[0], "Broken: no more data"),
        ("fleetlight.errors.ConfigError: a.b: c\n", "ConfigError: a.b: c"),
        ("x\nRuntimeError: a\ny\n", "RuntimeError: a"),
        ("x\nSystemExit: no data in clicks/\ny\n", "SystemExit: no data"),
        ("Fatal Python error: no module encodings\n\nThread 1\n", "Fatal Python error: no mod"),
        (
            "step 2\nFatal Python error: Segmentation fault\n\n" + STACKS,
            "at train.py:9 in <module>",
        ),
        ("bad\nFatal Python error: Aborted\n\n" + STACKS, "last line: bad; at train.py:9 in <mod"),
        ("bad\nFatal Python error: Aborted\n\n" + NO_STACK, "last line: bad"),
        ("terminate called\n  what(): y\nFatal Python error: Aborted\n\n", "terminate called"),
        ("step 1\nstep 2\n\n", ""),
        ("ValueError: old\n--- restart 1 ---\nstep\n", ""),
        ("", ""),
    ],
)
def test_last_error_of_a_log(log: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert last_error(file).startswith(found)
    assert bool(last_error(file)) == bool(found)


def test_long_line_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("ValueError: " + "x" * 1000)
    assert len(last_error(tmp_path / "log")) == 500


SECOND = TRACEBACK.partition("During")[2].partition("\n\n")[2].removesuffix("goodbye\n")


def traceback_of(tmp_path: Path, log: str, reported: str | None) -> str:
    (tmp_path / "log").write_text(log)
    return last_traceback(tmp_path / "log", reported)


def test_traceback_is_that_of_the_reported_error(tmp_path: Path) -> None:
    chain = TRACEBACK.removeprefix("step 1\n").removesuffix("goodbye\n").rstrip()
    assert traceback_of(tmp_path, TRACEBACK.replace("goodbye", "[fleet worker 1] x"), None) == chain
    caught = "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\nstep 2\n"
    assert traceback_of(tmp_path, SECOND + caught, "ValueError: second") == SECOND.rstrip()
    assert traceback_of(tmp_path, caught, "ValueError: second") == ""
    assert traceback_of(tmp_path, caught, "exited with code 3") == ""
    assert traceback_of(tmp_path, "step 1\nstep 2\n", None) == ""
    assert traceback_of(tmp_path, SECOND + "--- restart 1 ---\nstep\n", None) == ""


def test_traceback_has_no_colours_and_no_ranks(tmp_path: Path) -> None:
    coloured = SECOND.replace("ValueError", "\x1b[1;35mValueError\x1b[0m")
    ranked = "".join(f"[rank1]: {line}" for line in coloured.splitlines(keepends=True))
    assert traceback_of(tmp_path, ranked, "ValueError: second") == SECOND.rstrip()


def test_error_of_several_lines_is_whole_up_to_foreign_lines(tmp_path: Path) -> None:
    text = SECOND.rstrip() + "\nthe second line\n[fleet worker 1] left\n"
    assert traceback_of(tmp_path, text, None) == SECOND.rstrip() + "\nthe second line"


def test_long_traceback_keeps_both_ends(tmp_path: Path) -> None:
    frames = "".join(f'  File "t.py", line {n}, in f\n    f()\n' for n in range(60))
    log = f"Traceback (most recent call last):\n{frames}ValueError: deep\n"
    lines = traceback_of(tmp_path, log, "ValueError: deep").splitlines()
    assert len(lines) == 30
    assert lines[1] == '  File "t.py", line 0, in f'
    assert lines[6] == "  ... 93 more lines in the log ..."
    assert lines[-3:] == ['  File "t.py", line 59, in f', "    f()", "ValueError: deep"]


def test_long_chain_is_cut_to_its_last_error(tmp_path: Path) -> None:
    frames = "".join(f'  File "t.py", line {n}, in f\n    f()\n' for n in range(20))
    log = TRACEBACK.replace('  File "t.py", line 1, in f\n    g()\n', frames)
    assert traceback_of(tmp_path, log, "ValueError: second") == SECOND.rstrip() + "\ngoodbye"


def test_stack_of_a_crash_is_that_of_the_current_thread(tmp_path: Path) -> None:
    log = "step 1\nterminate called\nFatal Python error: Aborted\n\n" + STACKS
    assert traceback_of(tmp_path, log, None).splitlines() == [
        "step 1",
        "terminate called",
        "Fatal Python error: Aborted",
        "Current thread 0x00007f02 (most recent call first):",
        '  File "train.py", line 9 in <module>',
    ]


def frames(*files: str) -> str:
    return "".join(f'  File "{file}", line 1, in f\n    f()\n    ^^^\n' for file in files)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("fleetlight.errors.ConfigError: x", ["  ... 2 frames inside fleetlight ..."]),
        # it may be a bug of Fleetlight
        ("AssertionError: x", frames(f"{PACKAGE}/a.py", f"{PACKAGE}/b/c.py").splitlines()),
    ],
)
def test_frames_of_fleetlight_are_left_out_of_its_own_errors(
    error: str, shown: list[str], tmp_path: Path
) -> None:
    files = ("train.py", f"{PACKAGE}/a.py", f"{PACKAGE}/b/c.py", "lambda.py")
    log = f"Traceback (most recent call last):\n{frames(*files)}{error}\n"
    assert traceback_of(tmp_path, log, None).splitlines() == [
        "Traceback (most recent call last):",
        *frames("train.py").splitlines(),
        *shown,
        *frames("lambda.py").splitlines(),
        error,
    ]


# -- the record of a launcher in its log folder


ENTRY = ProcessEntry(name="worker 0", pid=7, start=8, status=-9, restarts=2)


def test_a_record_says_what_a_launcher_has_started(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "j", "10.0.0.1")
    [(record, owner)] = read_records(tmp_path)
    assert owner == os.getuid()
    assert (record.job, record.host, record.system) == ("j", "10.0.0.1", this_system())
    assert (record.pid, record.start) == (os.getpid(), start_of(os.getpid()))
    assert (record.ended, record.code, record.processes) == (False, None, ())
    file.update([ENTRY])
    file.conclude(75)
    file.close()
    [(record, _)] = read_records(tmp_path)
    assert (record.ended, record.code, record.processes) == (True, 75, (ENTRY,))


def test_only_its_user_may_read_the_one_file(tmp_path: Path) -> None:
    RecordFile(tmp_path, "j", "::1").update([ENTRY])
    [path] = tmp_path.glob("launcher.*")
    assert path.name == f"launcher.::1.{os.getpid()}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_damaged_records_are_omitted(tmp_path: Path) -> None:
    RecordFile(tmp_path, "j", "a")
    (tmp_path / "launcher.b.1.json").write_text("{")
    (tmp_path / "launcher.c.1.json").write_text("{}")
    assert [record.host for record, _ in read_records(tmp_path)] == ["a"]


def test_a_link_is_no_record(tmp_path: Path) -> None:
    RecordFile(tmp_path, "j", "a")
    [path] = tmp_path.iterdir()
    (tmp_path / "launcher.z.1.json").symlink_to(path)
    with pytest.raises(OSError, match=r"launcher\.z"):
        read_records(tmp_path)


def test_a_full_disk_does_not_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "replace_file", full)
    RecordFile(tmp_path, "j", "a").update([ENTRY])
    assert read_records(tmp_path) == []


# -- changes of a launcher's processes are events


def entry(pid: int, status: int | None = None, restarts: int = 0) -> ProcessEntry:
    return ProcessEntry(name="worker 1", pid=pid, start=1, status=status, restarts=restarts)


def test_what_changes_is_an_event() -> None:
    cases = [
        ([], [entry(3)], [("worker 1", "start", "started, pid 3")]),
        ([entry(3)], [entry(3)], []),
        ([entry(3)], [entry(3, 1)], [("worker 1", "exit", "exited with code 1")]),
        ([entry(3, 1)], [entry(3, 1)], []),
        ([entry(3)], [entry(4, restarts=1)], [("worker 1", "restart", "restart 1, pid 4")]),
        # it started and ended between two looks
        (
            [entry(3)],
            [entry(4, 0, 1)],
            [
                ("worker 1", "restart", "restart 1, pid 4"),
                ("worker 1", "exit", "exited with code 0"),
            ],
        ),
    ]
    for before, after, expected in cases:
        assert [(one.name, kind, text) for one, kind, text in changes(before, after)] == expected


def test_a_launcher_records_its_events(tmp_path: Path) -> None:
    record = RecordFile(tmp_path, "job", "127.0.0.1")
    record.update([entry(3)])
    record.update([entry(3, -9)])
    record.conclude(1)
    history = History(tmp_path)
    history.poll()
    assert [(one.who, one.kind) for one in history.events] == [
        ("worker 1", "start"),
        ("worker 1", "exit"),
        ("fleetrun", "end"),
    ]
    started, ended, end = history.events
    assert "SIGKILL" in ended.text
    assert [(one.host, one.pid, one.status) for one in (started, ended, end)] == [
        ("127.0.0.1", 3, None),
        ("127.0.0.1", 3, -9),
        ("127.0.0.1", None, 1),
    ]


def test_a_restart_has_its_number(tmp_path: Path) -> None:
    record = RecordFile(tmp_path, "job", "127.0.0.1")
    record.update([entry(3)])
    record.update([entry(3, -9)])
    record.update([entry(4, restarts=1)])
    history = History(tmp_path)
    history.poll()
    assert [one.restart for one in history.events] == [0, 0, 1]


# -- the log folder of one run


WORKER = JobProcess(kind=Kind.WORKER, index=0, of=1, local_rank=0, local_size=1)
LAYOUT = JobLayout(nodes=(Node(host="h", workers=(("h", 1),), servers=(("h", 2),), master_port=3),))


def write(path: Path, name: str, text: str = "old\n") -> None:
    path.mkdir(exist_ok=True)
    (path / name).write_text(text)


def test_only_logs_of_an_earlier_run_move_away(tmp_path: Path) -> None:
    logs = tmp_path / "log"
    for name in ("workerlog.0", "serverlog.1", "endpoints.log", "launcher.h.7.json", "notes.txt"):
        write(logs, name)
    folder = claim(str(logs), "a")
    assert folder.moved_to is not None
    assert folder.moved_to.parent == logs / "old"
    moved = sorted(entry.name for entry in folder.moved_to.iterdir())
    assert moved == ["endpoints.log", "launcher.h.7.json", "serverlog.1", "workerlog.0"]
    assert (logs / "notes.txt").exists()
    folder.close()


def test_two_runs_of_one_second_do_not_mix(tmp_path: Path) -> None:
    logs = tmp_path / "log"
    moved = set()
    for _ in range(3):
        write(logs, "workerlog.0")
        os.utime(logs / "workerlog.0", (1e9, 1e9))
        folder = claim(str(logs), "a")
        moved.add(folder.moved_to)
        folder.close()
    assert len(moved) == 3


def test_folder_in_use_is_not_claimed(tmp_path: Path) -> None:
    first = claim(str(tmp_path / "log"), "a")
    second = claim(str(tmp_path / "log"), "b")
    assert (first.path.name, second.path.name) == ("log", "log-2")
    first.close()
    third = claim(str(tmp_path / "log"), "c")
    assert third.path == first.path
    second.close()
    third.close()


def test_launchers_of_one_job_share_a_folder(tmp_path: Path) -> None:
    first = claim(str(tmp_path / "log"), "a")
    first.write_endpoints("a", LAYOUT)
    os.close(first.open(WORKER, restart=0))
    second = claim(str(tmp_path / "log"), "a")
    assert second.path == first.path
    assert (second.is_shared, second.moved_to) == (True, None)
    assert first.file(WORKER).exists()
    first.close()


def test_endpoints_are_logged(tmp_path: Path) -> None:
    folder = claim(str(tmp_path / "log"), "a")
    folder.write_endpoints("a", LAYOUT)
    text = (folder.path / "endpoints.log").read_text()
    assert text == "job a\nnode 0 h\nserver 0 h:2\nworker 0 h:1\n"
    folder.close()


def test_restart_is_marked(tmp_path: Path) -> None:
    folder = claim(str(tmp_path / "log"), "a")
    for restart in (0, 1):
        descriptor = folder.open(WORKER, restart)
        os.write(descriptor, b"run\n")
        os.close(descriptor)
    assert folder.file(WORKER).read_text() == "run\n--- restart 1 ---\nrun\n"
    folder.close()


def test_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot write logs to .*; make it writable or pass"):
        claim(str(tmp_path / "file" / "log"), "a")


def test_follower_shows_all_new_output(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"before\n")
    shown: list[bytes] = []
    follower = FileFollower(file, shown.append)
    follower.pump()
    with file.open("ab") as writer:
        writer.write(b"one\n")
        writer.flush()
        follower.pump()
        writer.write(b"x" * 3_000_000)
    follower.close()
    assert b"".join(shown) == b"one\n" + b"x" * 3_000_000


def test_tail_of_a_log(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"a" * 100 + b"\xffend")
    assert tail(file, 4) == b"\xffend"
    assert tail(tmp_path / "none") == b""


# -- reserved ports


HOST = "127.0.0.1"
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's bind")


@pytest.fixture
def taken() -> contextlib.closing[socket.socket]:
    return contextlib.closing(socket.create_server((HOST, 0)))


@LINUX_ONLY
def test_reserved_port_is_given_to_no_other_process() -> None:
    with contextlib.closing(Reservation(HOST)) as held:
        others = [Reservation(HOST) for _ in range(200)]
        assert held.port not in {other.port for other in others}
        for other in others:
            other.close()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, held.port))


@LINUX_ONLY
def test_child_may_listen_on_a_reserved_port() -> None:
    with contextlib.closing(Reservation(HOST)) as held:
        held.hand_over()
        with (
            socket.create_server((HOST, held.port)) as server,
            socket.create_connection((HOST, held.port)) as client,
        ):
            accepted, _ = server.accept()
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
            accepted.close()


def test_fixed_ports_are_consecutive() -> None:
    start = free_ports((HOST,), 3)
    held = reserve(HOST, 3, start)
    assert [one.port for one in held] == [start, start + 1, start + 2]
    for one in held:
        one.close()


@LINUX_ONLY
def test_error_for_a_port_in_use_names_its_owner(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        port = server.getsockname()[1]
        with pytest.raises(
            LaunchError, match=f"port {port} .* by process {os.getpid()} "
        ) as caught:
            reserve(HOST, 1, port)
    assert str(caught.value).endswith("end that process or choose another --start_port")


@LINUX_ONLY
def test_reservation_of_another_launcher_counts_as_in_use() -> None:
    held = Reservation(HOST)
    with pytest.raises(LaunchError, match="another fleetrun may hold it"):
        reserve(HOST, 1, held.port)
    held.close()


@LINUX_ONLY
def test_port_in_time_wait_is_free() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((HOST, port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first, so its end stays in TIME_WAIT
        client.close()
    with contextlib.closing(Reservation(HOST, port)) as held:
        assert held.port == port


@LINUX_ONLY
def test_listener_is_named(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        port = server.getsockname()[1]
        assert listener(port).startswith(f"process {os.getpid()} (")
    assert listener(port) == ""


@LINUX_ONLY
def test_listener_is_found_after_a_descriptor_closes() -> None:
    below = os.open(os.devnull, os.O_RDONLY)
    with socket.create_server((HOST, 0)) as taken:
        os.close(below)  # the descriptor of the listing itself, which then closes
        assert listener(taken.getsockname()[1]).startswith(f"process {os.getpid()} ")


@LINUX_ONLY
def test_command_of_several_lines_is_shown_in_one() -> None:
    code = "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s:\n"
    code += " print(s.getsockname()[1], flush=True)\n input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        owner = listener(int(child.stdout.readline()))
        child.communicate(b"\n", timeout=60)
    assert owner.startswith(f"process {child.pid} ({sys.executable} -c import socket with ")


def test_invalid_ports_are_refused() -> None:
    with pytest.raises(LaunchError, match="up to 65536, expected at most 65535"):
        reserve(HOST, 3, 65534)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match="not an address of this machine"):
        Reservation("203.0.113.1")


def test_listening_on_a_taken_port_returns_none(taken: contextlib.closing[socket.socket]) -> None:
    with taken as server:
        assert listen(HOST, server.getsockname()[1]) is None
    with contextlib.closing(Reservation(HOST)) as held:
        port = held.port
    listener = listen(HOST, port)
    assert listener is not None
    listener.close()


# -- one child process


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    with Reaper() as handle:
        yield handle


@pytest.fixture
def output(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def child(code: str, output: int, reaper: Reaper) -> Child:
    return Child([sys.executable, "-c", code], os.environ, output, reaper)


def waited_exit(one: Child) -> int:
    wait_until(lambda: one.poll() is not None, "the child to end")
    status = one.poll()
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_exit_status_of_a_child(code: str, status: int, output: int, reaper: Reaper) -> None:
    one = child(code, output, reaper)
    assert waited_exit(one) == status
    one.end()
    assert one.poll() == status


def test_child_leads_a_group_and_has_no_input(output: int, reaper: Reaper, tmp_path: Path) -> None:
    one = child("import os, sys; print(os.getpgid(0), repr(sys.stdin.read()))", output, reaper)
    assert waited_exit(one) == 0
    one.end()
    assert (tmp_path / "out").read_text() == f"{one.pid} ''\n"


def test_exited_child_keeps_its_pid_until_it_is_reaped(output: int, reaper: Reaper) -> None:
    one = child("pass", output, reaper)
    waited_exit(one)
    os.kill(one.pid, 0)  # still a zombie
    one.end()
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


GRANDCHILD = """
import pathlib, subprocess
process = subprocess.Popen(["sleep", "60"])
pathlib.Path("{file}").write_text(f"{{process.pid}}\\n")
"""


def test_end_kills_grandchildren(output: int, reaper: Reaper, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    one = child(GRANDCHILD.format(file=file), output, reaper)
    waited_exit(one)
    grandchild = int(file.read_text())
    assert is_running(grandchild)
    one.end()
    wait_until(lambda: not is_running(grandchild), "the grandchild to end")


def test_signal_reaches_the_child(output: int, reaper: Reaper) -> None:
    one = child("import time; time.sleep(60)", output, reaper)
    one.signal(signal.SIGTERM)
    assert waited_exit(one) == -signal.SIGTERM
    one.end()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed in /proc")
def test_child_inherits_no_descriptor_of_ours(output: int, reaper: Reaper, tmp_path: Path) -> None:
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    one = child(code, output, reaper)
    assert waited_exit(one) == 0
    one.end()
    assert (tmp_path / "out").read_text() == "[0, 1, 2]\n"


def test_failed_start_raises_launch_error(output: int, reaper: Reaper) -> None:
    with pytest.raises(LaunchError, match="cannot start"):
        Child([sys.executable, "x" * 10_000_000], os.environ, output, reaper)


def test_ask_signals_the_leader_only(output: int, reaper: Reaper, tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys; "
        "signal.signal(signal.SIGTERM, lambda *_: None); "
        "inner = subprocess.Popen(['sleep', '600']); "
        "print(inner.pid, flush=True); signal.pause(); print('asked', flush=True); signal.pause()"
    )
    one = child(code, output, reaper)
    text = tmp_path / "out"
    wait_until(lambda: text.read_text().endswith("\n"), "the child to begin")
    one.ask(signal.SIGTERM)
    wait_until(lambda: text.read_text().endswith("asked\n"), "it to be asked")
    inner = int(text.read_text().split()[0])
    assert is_running(inner)
    one.end()
    wait_until(lambda: not is_running(inner), "the other to end")
