# SPDX-License-Identifier: Apache-2.0
"""The processes of one machine, without the loop that supervises them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.launch.workplace import DEADLINE_S, wait_until

from fleetlight.errors import LaunchError
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.gang import Gang
from fleetlight.launch.processes.logs import LogFolder, claim
from fleetlight.launch.processes.output import held
from fleetlight.launch.processes.record import ProcessEntry
from fleetlight.launch.status import read
from fleetlight.observe.console import Tone
from fleetlight.roles import Kind

pytestmark = pytest.mark.slow

HERE = "127.0.0.1"
NODE = Node(host=HERE, workers=((HERE, 1), (HERE, 2)), servers=((HERE, 3),), master_port=4)


class Screen:
    """A screen that keeps its output."""

    size: Any = None
    verbose = False

    def __init__(self) -> None:
        self.shown = b""

    def say(self, text: str, tone: Tone = Tone.PLAIN) -> None:
        raise AssertionError("a gang does not speak")

    def block(self, text: str) -> None:
        raise AssertionError("a gang prints no table")

    def show(self, data: bytes) -> None:
        self.shown += data


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[LogFolder]:
    logs = claim(str(tmp_path / "log"), "a")
    yield logs
    logs.close()


def gang(
    folder: LogFolder,
    screen: Screen,
    script: str,
    *,
    tee: bool = False,
    look: Callable[[Gang], None] = lambda made: None,
) -> Gang:
    """A gang whose processes have exited; `look` sees it before it closes."""
    file = folder.path / "t.py"
    file.write_text(script)
    job = JobSpec(script=str(file), collective=False, tee=tee)
    run = Run(
        job=job,
        layout=JobLayout(nodes=(NODE,)),
        log_dir=str(folder.path),
        error_dir=str(folder.path),
    )
    with Reaper() as reaper:
        made = Gang(run, folder=folder, reaper=reaper, screen=screen, outside=os.environ)
        try:
            made.start()
            wait_until(lambda: len(made.exits()) == 3, "all to exit")
            look(made)
        finally:
            made.close()
    return made


SAY = "import os; print(os.environ['FLEET_ROLE'], os.environ['FLEET_INDEX'], end='')"


def test_close_shows_the_last_output_of_worker_0(folder: LogFolder) -> None:
    screen = Screen()
    gang(folder, screen, SAY)
    assert screen.shown == b"worker 0"


def test_tee_shows_all_and_ends_open_lines(folder: LogFolder) -> None:
    screen = Screen()
    gang(folder, screen, SAY, tee=True)
    assert sorted(screen.shown.splitlines()) == [
        b"[server 0] server 0",
        b"[worker 0] worker 0",
        b"[worker 1] worker 1",
    ]


FAIL_WITH = """
import os, sys
if os.environ["FLEET_ROLE"] == "worker" and os.environ["FLEET_INDEX"] == "0":
    sys.stderr.write("Traceback (most recent call last):\\nPeerLostError")
else:
    sys.exit({})
"""


@pytest.mark.parametrize("status", [0, 1])
def test_traceback_is_held_once_another_process_has_failed(
    folder: LogFolder, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(held, "_HOLD_S", 0.0)
    shown: list[bytes] = []

    def look(made: Gang) -> None:
        # read, then show what was held for long enough
        made.pump()
        shown.append(screen.shown)

    screen = Screen()
    gang(folder, screen, FAIL_WITH.format(status), look=look)
    assert (b"PeerLostError" in shown[0]) == (status == 0)


LEAVE = """
import json, os, sys
reported = {"at": 5.5, "error": "E: x", "caused_by_peer": True}
with open(os.environ["FLEET_ERROR_FILE"], "w") as file:
    json.dump(reported, file)
sys.exit(int(os.environ["FLEET_INDEX"]) + 1)
"""


def test_exit_has_the_reported_status(folder: LogFolder) -> None:
    exits = gang(folder, Screen(), LEAVE).exits()
    assert sorted((seen.member.name, seen.status) for seen in exits) == [
        ("server 0", 1),
        ("worker 0", 1),
        ("worker 1", 2),
    ]
    assert {(seen.at, seen.reported.error, seen.reported.caused_by_peer) for seen in exits} == {
        (5.5, "E: x", True)
    }


def test_exits_have_monotonic_times(folder: LogFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    days = iter(range(10**6))
    # the wall clock jumps at each call
    monkeypatch.setattr(time, "time", lambda: now() - 86_400 * next(days))
    made = gang(folder, Screen(), "raise SystemExit(3)")
    assert all(0 <= seen.at - made.started_at < DEADLINE_S for seen in made.exits())


END = """
import json, os, signal
with open(os.environ["FLEET_ERROR_FILE"], "w") as file:
    json.dump({"at": 5.5, "restartable": True}, file)
if os.environ["FLEET_ROLE"] == "server":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(3 * int(os.environ["FLEET_INDEX"]))
"""


def test_process_that_exits_with_a_code_is_not_restarted_alone(folder: LogFolder) -> None:
    """No exit hook ran, so its earlier report stands."""
    exits = gang(folder, Screen(), END).exits()
    assert {(seen.member.name, seen.status, seen.may_restart_alone) for seen in exits} == {
        ("server 0", -signal.SIGKILL, True),
        ("worker 0", 0, False),
        ("worker 1", 3, False),
    }


def test_failed_start_leaves_no_process(folder: LogFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    spawn = Gang._spawn

    def fail_at_the_last(self: Gang, member: object, output: int) -> object:
        if len(started) == 2:
            raise LaunchError("no more processes")
        child = spawn(self, member, output)  # type: ignore[arg-type]
        started.append(child.pid)
        return child

    monkeypatch.setattr(Gang, "_spawn", fail_at_the_last)
    with pytest.raises(LaunchError, match="no more processes"):
        gang(folder, Screen(), "import time; time.sleep(600)")
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


DIE_ONCE = """
import os, pathlib, signal
mark = pathlib.Path(os.environ["FLEET_ERROR_FILE"] + ".mark")
restart = int(mark.exists())
mark.touch()
print("attempt", restart, flush=True)
if os.environ["FLEET_ROLE"] == "worker" and os.environ["FLEET_INDEX"] == "0" and not restart:
    os.kill(os.getpid(), signal.SIGKILL)
"""


class LoggingScreen(Screen):
    """A screen, perhaps a terminal, that records the launcher's lines about restarts."""

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.size = size
        self.lines: list[str] = []

    def say(self, text: str, tone: Tone = Tone.PLAIN) -> None:
        self.lines.append(text)


def restart_one(
    folder: LogFolder,
    screen: Screen,
    *,
    tee: bool = False,
    record: Callable[[Sequence[ProcessEntry]], None] = lambda entries: None,
) -> None:
    """Start a gang, and restart its worker 0, which is killed, alone."""
    file = folder.path / "t.py"
    file.write_text(DIE_ONCE)
    run = Run(
        job=JobSpec(script=str(file), collective=False, tee=tee),
        layout=JobLayout(nodes=(NODE,)),
        log_dir=str(folder.path),
        error_dir=str(folder.path),
    )
    with Reaper() as reaper:
        made = Gang(
            run, folder=folder, reaper=reaper, screen=screen, outside=os.environ, record=record
        )
        try:
            made.start()
            wait_until(lambda: len(made.exits()) == 3, "all to exit")
            (dead,) = [seen for seen in made.exits() if seen.status]
            made.restart_alone(dead, left=2)
            wait_until(lambda: len(made.exits()) == 3, "all to exit again")
        finally:
            made.close()
    assert {seen.status for seen in made.exits()} == {0}


def test_each_change_of_a_process_is_recorded(folder: LogFolder) -> None:
    records: list[dict[str, ProcessEntry]] = []
    restart_one(
        folder,
        LoggingScreen(None),
        record=lambda entries: records.append({entry.name: entry for entry in entries}),
    )
    first, last = records[0], records[-1]
    assert [(entry.status, entry.restarts) for entry in first.values()] == [(None, 0)] * 3
    assert all(entry.start is not None for entry in first.values())
    assert {name: (entry.status, entry.restarts) for name, entry in last.items()} == {
        "server 0": (0, 0),
        "worker 0": (0, 1),
        "worker 1": (0, 0),
    }
    assert last["worker 0"].pid != first["worker 0"].pid
    assert -signal.SIGKILL in [record["worker 0"].status for record in records]
    # a record for each change, not for each look: at most start, three exits, restart, exit
    assert len(records) <= 6


@pytest.mark.parametrize(("tee", "size"), [(False, None), (True, None), (False, (24, 80))])
def test_output_of_a_restarted_process_is_shown(folder: LogFolder, tee: bool, size: Any) -> None:
    screen = LoggingScreen(size)
    restart_one(folder, screen, tee=tee)
    assert screen.shown.count(b"attempt 1") == 1
    assert "restarting it (restart 1, 2 left)" in "".join(screen.lines)


SAVE_AT_SIGTERM = """
import os, pathlib, signal, sys, time
file = pathlib.Path(os.environ["FLEET_ERROR_FILE"])
is_first = os.environ["FLEET_ROLE"] == "worker" and os.environ["FLEET_INDEX"] == "0"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if file.exists():
    # an incarnation that does not save yet
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file.with_name("restarted").touch()
    while not file.with_name("go").exists():
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
file.write_text('{"saves_at_sigterm": true}')
if is_first and not file.with_name("restarted").exists():
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.01)
"""


def all_save(folder: LogFolder) -> bool:
    return sum(read(str(file)).saves_at_sigterm for file in folder.path.glob("*.json")) == 3


def test_restarted_process_gets_no_signal_before_it_saves(folder: LogFolder) -> None:
    file = folder.path / "t.py"
    file.write_text(SAVE_AT_SIGTERM)
    job = JobSpec(script=str(file), collective=False)
    run = Run(
        job=job,
        layout=JobLayout(nodes=(NODE,)),
        log_dir=str(folder.path),
        error_dir=str(folder.path),
    )
    with Reaper() as reaper:
        made = Gang(
            run, folder=folder, reaper=reaper, screen=LoggingScreen(None), outside=os.environ
        )
        try:
            made.start()
            wait_until(lambda: len(made.exits()) == 1, "one to die")
            wait_until(made.can_stop, "the others to say that they save")
            made.restart_alone(made.exits()[0], left=2)
            wait_until((folder.path / "restarted").exists, "it to restart")
            assert made.can_stop()
            made.ask(signal.SIGTERM, (Kind.WORKER,))
            wait_until(lambda: len(made.exits()) == 1, "the other worker to end")
            assert [(seen.member.index, seen.status) for seen in made.exits()] == [(1, 75)]
            (folder.path / "go").touch()
            wait_until(lambda: all_save(folder), "it to say so, too")
            made.ask(signal.SIGTERM, (Kind.WORKER,))
            wait_until(lambda: len(made.exits()) == 2, "it to end")
        finally:
            made.close()
    assert {seen.status for seen in made.exits()} == {75}
