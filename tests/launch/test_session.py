# SPDX-License-Identifier: Apache-2.0
"""Real jobs on this machine: start, supervision and end."""

import json
import re
import signal

import pytest
from tests.launch.workplace import DEADLINE_S, SAVING, Workplace, is_running, outcome, wait_until

from fleetlight.launch.exit_codes import PERMANENT
from fleetlight.observe.console import without_control

pytestmark = pytest.mark.multiprocess

REPORT = """
    import json, os, pathlib, sys
    role, index = os.environ["FLEET_ROLE"], os.environ["FLEET_INDEX"]
    pathlib.Path(f"{role}.{index}").write_text(json.dumps(dict(os.environ)) + "\\n")
    print("I am", role, index, *sys.argv[1:])
"""

#: writes its process id and waits for its end
STAY = """
    import os, pathlib, time
    pathlib.Path("pid." + os.environ["FLEET_INDEX"]).write_text(f"{os.getpid()}\\n")
    time.sleep(600)
"""


def test_collective_job(place: Workplace) -> None:
    code, output = place.run("--nproc_per_node", "2", place.script(REPORT), "--lr", "3")
    assert code == 0
    assert "\nI am worker 0 --lr 3\n" in output
    assert "I am worker 1" not in output
    assert place.log("workerlog.1") == "I am worker 1 --lr 3\n"
    start = output[: output.index("I am worker 0")].splitlines()
    assert start == [
        "fleetrun: starting train.py: workers 0 to 1 of 2 on this machine; logs: log/workerlog.N"
    ]
    assert outcome(output).startswith("fleetrun: done: all 2 workers exited with code 0 after")
    seen = [json.loads((place.path / f"worker.{n}").read_text()) for n in (0, 1)]
    assert [env["RANK"] for env in seen] == ["0", "1"]
    assert len({env["FLEET_WORKER_ENDPOINTS"] for env in seen}) == 1
    assert not {"http_proxy", "FLEET_DEVICE"} & set(seen[0])


def test_verbose_shows_the_arguments_and_both_first_processes(place: Workplace) -> None:
    flags = ("-v", "--server_num", "2", "--worker_num", "2")
    code, output = place.run(*flags, place.script(REPORT))
    assert code == 0
    start = output[: output.index("\nfleetrun: starting ")]
    assert start.startswith("-----------  Configuration Arguments")
    assert "\nserver_num: 2\n" in start
    server, worker = start.split("Distributed Envs")[1:]
    assert "Value (server 0)" in server
    assert "| FLEET_ROLE             | server " in server
    assert "Value (worker 0)" in worker
    assert "| FLEET_ROLE             | worker " in worker


def test_parameter_server_job(place: Workplace) -> None:
    script = place.script(REPORT)
    code, output = place.run("--server_num", "2", "--worker_num", "1", "--tee", script)
    assert code == 0
    for name in ("server 0", "server 1", "worker 0"):
        assert f"[{name}] I am {name}\n" in output
    server = json.loads(place.log("../server.1"))
    assert server["FLEET_SERVER_ENDPOINTS"].split(",")[1] in place.log("endpoints.log")
    assert "RANK" not in server
    assert "servers ended by themselves" in outcome(output)


def test_servers_end_after_the_workers(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    script = place.script("""
        import os, time
        time.sleep(600 if os.environ["FLEET_ROLE"] == "server" else 0)
    """)
    code, output = place.run("--server_num", "1", "--worker_num", "1", script)
    assert code == 0
    assert outcome(output).endswith("; servers ended")


@pytest.mark.parametrize(
    ("failing", "code", "reason"),
    [
        ("raise ValueError('bad batch')", 1, "exited with code 1 after .*: ValueError: bad batch"),
        ("print('no data'); sys.exit(3)", 3, "exited with code 3 .*: last line: no data"),
        ("os.kill(os.getpid(), 9)", 137, r"was killed by SIGKILL \(often: out of memory\)"),
        (
            "import fleetlight; fleetlight.init; os.abort()",
            134,
            r"was killed by SIGABRT .*: at .*:4 in <module>",
        ),
    ],
)
def test_first_failure_ends_the_job_and_is_reported(
    failing: str, code: int, reason: str, place: Workplace
) -> None:
    script = place.script(f"""
        import os, sys, time
        if os.environ["FLEET_INDEX"] == "1":
            {failing}
        time.sleep(600)
    """)
    found, output = place.run("--nproc_per_node", "3", script)
    assert found == code
    line = outcome(output)
    assert re.search(f"^fleetrun: failed: worker 1 of 3 {reason}", line), line
    assert line.endswith("(log: log/workerlog.1)")


def test_dead_server_ends_the_job(place: Workplace) -> None:
    script = place.script("""
        import os, sys, time
        if os.environ["FLEET_ROLE"] == "server":
            sys.exit(7)
        time.sleep(600)
    """)
    code, output = place.run("--server_num", "1", "--worker_num", "1", script)
    assert code == 7
    assert "failed: server 0 of 1 exited with code 7" in outcome(output)


def test_consequence_is_not_reported_as_the_cause(place: Workplace) -> None:
    script = place.script("""
        import json, os, pathlib, sys, time
        def leave(error, consequence):
            status = {"at": time.monotonic(), "error": error, "caused_by_peer": consequence}
            pathlib.Path(os.environ["FLEET_ERROR_FILE"]).write_text(json.dumps(status))
            sys.exit(1)
        def has_ended(pid):
            stat = pathlib.Path(f"/proc/{pid}/stat")
            try:
                return stat.read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                return True
        if os.environ["FLEET_INDEX"] == "0":
            pathlib.Path("written").write_text(str(os.getpid()))
            os.replace("written", "pid")
            while not os.path.exists("cause"):
                time.sleep(0.001)
            leave("PeerLostError: worker 1", True)
        while not os.path.exists("pid"):
            time.sleep(0.001)
        pathlib.Path("cause").touch()
        while not has_ended(pathlib.Path("pid").read_text()):
            time.sleep(0.001)
        leave("ValueError: the cause", False)
    """)
    _, output = place.run("--nproc_per_node", "2", script)
    assert "worker 1 of 2 exited with code 1" in outcome(output)
    assert "ValueError: the cause" in outcome(output)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interrupt_ends_all_processes(number: signal.Signals, code: int, place: Workplace) -> None:
    # under nohup the signal is ignored, and children inherit that
    before = signal.signal(number, signal.SIG_DFL)
    try:
        job = place.start("--nproc_per_node", "2", place.script(STAY))
    finally:
        signal.signal(number, before)
    pids = [int(place.wait_for(f"pid.{n}")) for n in (0, 1)]
    job.process.send_signal(number)
    found, output = job.end()
    assert found == code
    who = "you" if number == signal.SIGINT else number.name
    assert outcome(output).startswith(f"fleetrun: stopped by {who} after ")
    assert "Traceback" not in output
    assert not any(map(is_running, pids))


#: records signals and does not end
STUBBORN = """
    import os, pathlib, signal, time
    def record(number, frame):
        pathlib.Path("noted").write_text(f"{number}\\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, record)
    pathlib.Path("pid." + os.environ["FLEET_INDEX"]).write_text(f"{os.getpid()}\\n")
    while True:
        time.sleep(600)
"""


def test_process_that_ignores_signals_dies_after_the_grace_period(place: Workplace) -> None:
    job = place.start("--grace_s", "3", place.script(STUBBORN))
    pid = int(place.wait_for("pid.0"))
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 143
    assert place.wait_for("noted") == "15\n"
    assert not is_running(pid)


def test_second_interrupt_kills_at_once(place: Workplace) -> None:
    job = place.start("--grace_s", "500", place.script(STUBBORN))
    place.wait_for("pid.0")
    job.process.send_signal(signal.SIGINT)
    assert place.wait_for("noted") == "2\n"
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130


def stop_and_save(place: Workplace, *arguments: str, grace_s: str = "50") -> tuple[int, str]:
    """Stop a job of one server and one worker."""
    flags = ("--server_num", "1", "--worker_num", "1", "--checkpoint", "ckpt")
    job = place.start(*flags, "--grace_s", grace_s, place.script(SAVING), *arguments)
    for name in ("server", "worker"):
        place.wait_for(f"pid.{name}")
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    return code, outcome(output)


def test_stop_signals_workers_and_no_servers(place: Workplace) -> None:
    code, last = stop_and_save(place)
    assert code == 75
    assert f"stopped at step 7, saved in {place.path / 'ckpt'}; resume with" in last
    assert not (place.path / "noted.server").exists()


@pytest.mark.parametrize(
    ("how", "grace_s", "why"),
    [("late", "0.2", "in time"), ("full", "50", "(worker 0 of 1 exited with code 1")],
)
def test_failed_stop_is_an_interrupt(place: Workplace, how: str, grace_s: str, why: str) -> None:
    code, last = stop_and_save(place, how, grace_s=grace_s)
    assert code == 143
    assert "stopped by SIGTERM after" in last
    assert f"the job did not save {why}" in last


FAMILY = """
    import os, pathlib, subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}\\n")
    time.sleep(float(sys.argv[1]))
"""


def test_no_process_survives_a_killed_fleetrun(place: Workplace) -> None:
    job = place.start(place.script(FAMILY), "600")
    pids = [int(word) for word in place.wait_for("pids").split()]
    assert all(map(is_running, pids))
    job.process.kill()
    wait_until(lambda: not any(map(is_running, pids)), "child and grandchild to end")


def test_grandchildren_end_with_the_job(place: Workplace) -> None:
    code, _ = place.run(place.script(FAMILY), "0")
    assert code == 0
    _, grandchild = place.wait_for("pids").split()
    wait_until(lambda: not is_running(int(grandchild)), "the grandchild to end")


def test_gang_restarts(place: Workplace) -> None:
    script = place.script("""
        import os, sys
        restart = os.environ["FLEET_RESTART"]
        print("start", restart, os.environ["FLEET_MASTER"])
        sys.exit(5 if restart in "01" and os.environ["FLEET_INDEX"] == "1" else 0)
    """)
    code, output = place.run("--nproc_per_node", "2", "--max_restarts", "2", script)
    assert code == 0, output
    assert "restarting all processes (restart 2, 0 left)" in output
    log = place.log("workerlog.0").splitlines()
    assert [line for line in log if line.startswith("---")] == [
        "--- restart 1 ---",
        "--- restart 2 ---",
    ]
    assert len({line for line in log if line.startswith("start")}) == 3


def test_restarts_are_limited(place: Workplace) -> None:
    code, output = place.run("--max_restarts", "1", place.script("raise SystemExit(5)"))
    assert code == 5
    assert output.count("restarting all processes") == 1


def test_permanent_error_causes_no_restart(place: Workplace) -> None:
    script = place.script("""
        import fleetlight as fleet
        away = {"away_s": 9.0}
        fleet.init(strategy=fleet.DistributedStrategy(
            durability="log", deadline_s=5.0, durability_configs=away
        ))
    """)
    flags = ("--server_num", "1", "--worker_num", "1", "--max_restarts", "3")
    code, output = place.run(*flags, script)
    assert code == PERMANENT
    assert "restarting all processes" not in output
    assert "StrategyError: " in outcome(output)


def test_two_jobs_in_one_folder_do_not_disturb_each_other(place: Workplace) -> None:
    script = place.script("""
        import os, pathlib, sys, time
        pathlib.Path(sys.argv[1]).write_text(os.environ["FLEET_WORKER_ENDPOINTS"] + "\\n")
        while not (os.path.exists("one") and os.path.exists("two")):
            time.sleep(0.01)
        print("I am", sys.argv[1])
    """)
    first = place.start("--nproc_per_node", "2", script, "one")
    place.wait_for("one")
    code, output = place.run("--nproc_per_node", "2", script, "two")
    assert (code, first.end()[0]) == (0, 0)
    assert "log is in use by another fleetrun: logs of this run go to log-2" in output
    assert place.log("workerlog.0") == "I am one\n"
    assert place.log("workerlog.0", "log-2") == "I am two\n"
    ports = [(place.path / name).read_text().strip().split(",") for name in ("one", "two")]
    assert not set(ports[0]) & set(ports[1])


def test_old_logs_are_kept_apart(place: Workplace) -> None:
    script = place.script("print('run')")
    place.run(script)
    _, output = place.run("-v", script)
    assert "fleetrun: moved the logs of an earlier run to log/old/" in output
    assert place.log("workerlog.0") == "run\n"
    assert len(list(place.path.glob("log/old/*/workerlog.0"))) == 1


def test_all_output_of_worker_0_is_shown(place: Workplace) -> None:
    _, output = place.run(place.script("for n in range(50_000): print('line', n)"))
    assert sum(1 for line in output.splitlines() if line.startswith("line ")) == 50_000


def test_output_is_shown_while_the_job_runs(place: Workplace) -> None:
    script = place.script("""
        import os, time
        print("ready")
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    job = place.start(script)
    assert job.process.stdout is not None
    assert any(line == "ready\n" for line in job.process.stdout)
    place.script("", "go")
    assert job.end()[0] == 0


def test_closed_reader_of_the_output_does_not_end_the_job(place: Workplace) -> None:
    script = place.script("""
        import pathlib
        for n in range(50_000): print("line", n)
        pathlib.Path("done").write_text("yes\\n")
    """)
    job = place.start(script)
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(timeout=DEADLINE_S) == 0
    assert place.wait_for("done") == "yes\n"


def test_worker_0_has_a_terminal_if_fleetrun_has_one(place: Workplace) -> None:
    script = place.script("""
        import sys
        sys.stdout.write("\\r 50%")
        sys.stdout.write("\\r\\x1b[1m100%\\x1b[0m " + str(sys.stdout.isatty()) + "\\n")
    """)
    code, shown = place.run_on_terminal("--nproc_per_node", "2", script)
    assert code == 0
    assert "\r 50%\r\x1b[1m100%\x1b[0m True\n" in shown
    assert place.log("workerlog.0") == "100% True\n"
    assert "False" in place.log("workerlog.1")


def test_module_can_be_run(place: Workplace) -> None:
    place.script("import sys; print('module', sys.argv[1:])", "mine.py")
    code, output = place.run("-m", "mine", "x")
    assert code == 0
    assert "module ['x']" in output


def test_gpus_flag_on_a_machine_without_gpus_uses_cpus(place: Workplace) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    code, output = place.run("--gpus", "0,1", "--server_num", "1", place.script(REPORT), **hidden)
    assert code == 0
    assert "fleetrun: --gpus 0,1: this machine has no GPU; workers use CPUs" in output
    assert (place.path / "worker.1").exists()


# -- what a user sees of real jobs: in a terminal, in a narrow one, and in a pipe


#: worker 1 fails, and worker 0 because of it
FAILING = """
    import os, pathlib, sys, time

    class PeerLostError(Exception):
        pass

    def train():
        print("[fleet worker %s] step 1" % os.environ["FLEET_INDEX"], flush=True)
        if os.environ["FLEET_INDEX"] == "1":
            while not pathlib.Path("lost").exists():
                time.sleep(0.01)
            raise ValueError("bad batch")
        sys.stderr.write("Traceback (most recent call last):\\n")
        sys.stderr.write("  File 'x'\\nPeerLostError: worker 1 was lost\\n")
        sys.stderr.flush()
        pathlib.Path("lost").touch()
        time.sleep(600)

    train()
"""
FAILED = "fleetrun: failed: worker 1 of 2 exited with code 1 after "


def plain(shown: str) -> str:
    return without_control(shown.encode()).decode()


def test_failure_is_that_of_the_culprit_alone(place: Workplace) -> None:
    code, output = place.run("--nproc_per_node", "2", place.script(FAILING))
    assert code == 1
    start, step, *traceback, failed, remedy = output.splitlines()
    assert start.startswith("fleetrun: starting train.py: workers 0 to 1 of 2 on this machine")
    assert step == "[fleet worker 0] step 1"
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: bad batch"
    assert any("in train" in line for line in traceback)
    assert failed.startswith(FAILED)
    assert failed.endswith(": ValueError: bad batch (log: log/workerlog.1)")
    assert remedy.startswith("fleetrun: correct the script or its data where the traceback ends")
    assert "PeerLostError" not in output
    assert "PeerLostError" in place.log("workerlog.0")
    assert "\x1b" not in output


def test_tee_shows_each_prefix_and_the_traceback_once(place: Workplace) -> None:
    _, output = place.run("--tee", "--nproc_per_node", "2", place.script(FAILING))
    assert "\n[fleet worker 1] step 1\n" in output
    assert "[worker 1] [" not in output
    assert output.count("Traceback") == 1
    assert output.count("ValueError: bad batch\n") == 1


def test_quiet_start_shows_the_script_and_failures_only(place: Workplace) -> None:
    script = place.script("import os; print('role', os.environ['FLEET_LOG_LEVEL'])")
    assert place.run("-q", script) == (0, "role warning\n")
    code, output = place.run("-q", "--nproc_per_node", "2", place.script(FAILING))
    assert code == 1
    assert "starting" not in output
    assert outcome(output).startswith(FAILED)
    assert "ValueError: bad batch\nfleetrun: failed" in output
    code, output = place.run("-q", "-v", script)
    assert code == 2
    assert "--verbose and --quiet" in output


def test_terminal_gets_colours_unless_the_user_wants_none(place: Workplace) -> None:
    flags = ("--nproc_per_node", "2", place.script(FAILING))
    code, shown = place.run_on_terminal(*flags, NO_COLOR="", FORCE_COLOR="")
    assert code == 1
    assert "\x1b[2mfleetrun:\x1b[0m \x1b[31mfailed: worker 1 of 2" in shown
    assert "PeerLostError" not in shown
    _, shown = place.run_on_terminal(*flags, NO_COLOR="1")
    assert "\x1b" not in shown.replace("\x1b[?25h", "")
    assert "fleetrun: failed: worker 1 of 2" in shown
    _, output = place.run(*flags, FORCE_COLOR="1", NO_COLOR="")
    assert "\x1b[31mfailed: worker 1 of 2" in output


def test_lines_break_at_words_in_a_narrow_terminal(place: Workplace) -> None:
    flags = ("--nproc_per_node", "2", place.script(FAILING))
    _, shown = place.run_on_terminal(*flags, columns=40)
    lines = [line for line in plain(shown).splitlines() if not line.startswith("  File")]
    assert max(map(len, lines)) <= 40, lines
    assert "fleetrun: starting train.py: workers 0" in lines
    # a name of a file stays whole, so that it can be copied
    assert any("log/workerlog.1)" in line for line in lines)


def test_script_that_never_joins_is_named(place: Workplace) -> None:
    script = place.script("print('done')")
    code, output = place.run("--server_num", "1", "--worker_num", "1", script)
    assert code == 0
    assert "train.py never called fleet.init: the servers stored nothing" in output
    _, output = place.run("--nproc_per_node", "2", script)
    assert "each of the 2 workers trained alone" in output
    _, output = place.run(script)
    assert "fleet.init" not in output


def test_script_that_joins_is_not_named_and_starts_in_five_lines(place: Workplace) -> None:
    script = place.script("""
        import fleetlight as fleet
        fleet.init(is_collective=True)
        print("trains")
    """)
    code, output = place.run("--nproc_per_node", "2", script)
    assert code == 0, output
    assert "never called" not in output
    lines = output.splitlines()
    assert lines.index("trains") <= 5
    assert "[fleet worker 0] collective: worker 0 of 2 on 1 host, gloo (dialect FLEET_*)" in lines
    _, output = place.run("-v", "--nproc_per_node", "2", script)
    assert "[fleet worker 0] own address 127.0.0.1, interface lo" in output
