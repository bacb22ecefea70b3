# SPDX-License-Identifier: Apache-2.0
"""What a user sees of real jobs: in a terminal, in a narrow one, and in a pipe."""

import pytest
from tests.launch.workplace import Workplace, outcome

from fleetlight.observe.console import without_control

pytestmark = pytest.mark.multiprocess

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
