# SPDX-License-Identifier: Apache-2.0
"""The exit status of a process, as the launcher and the other workers see it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.warm_scripts import WarmScript
from tests.workers import environment, reserved_port

from fleetlight.launch.exit_codes import ERROR, PEER_FAILED, PERMANENT
from fleetlight.launch.status import read

pytestmark = pytest.mark.multiprocess


# with all of Python's exit handlers
WHOLE = "import atexit, gc\natexit.unregister(gc.freeze)"


def run_script(body: str, index: int, workers: int, port: int, word: Path) -> WarmScript:
    code = f"{WHOLE}\nimport fleetlight as fleet\nfleet.init(is_collective=True)\n{body}"
    env = {**os.environ, **environment(index, workers, port), "FLEET_ERROR_FILE": str(word)}
    return WarmScript(code, env)


def run_both(bodies: tuple[str, str], tmp_path: Path) -> tuple[list[int], list[str], list[Any]]:
    """Exit codes, outputs and last status (None: there is none) of two workers."""
    holder, port = reserved_port()
    words = [tmp_path / "0.json", tmp_path / "1.json"]
    with holder:
        processes = [run_script(bodies[i], i, 2, port, words[i]) for i in range(2)]
        outputs = [p.communicate()[0] for p in processes]
    statuses = [read(str(w)) if w.exists() else None for w in words]
    return [p.returncode for p in processes], outputs, statuses


def test_last_status_separates_cause_from_consequence(tmp_path: Path) -> None:
    holder, port = reserved_port()
    words = [tmp_path / "0.json", tmp_path / "1.json"]
    with holder:
        processes = [
            run_script("fleet.barrier_worker()", 0, 2, port, words[0]),
            run_script("raise KeyError('on purpose')", 1, 2, port, words[1]),
        ]
        outputs = [p.communicate()[0] for p in processes]
    assert [p.returncode for p in processes] == [PEER_FAILED, ERROR], outputs
    victim, culprit = (read(str(word)) for word in words)
    assert culprit.error == "KeyError: 'on purpose'"
    assert culprit.caused_by_peer is False
    assert victim.caused_by_peer is True
    assert "worker 1" in victim.error
    assert "KeyError: 'on purpose'" in victim.error
    assert culprit.at < victim.at


@pytest.mark.parametrize(
    ("body", "error", "is_lasting"),
    [
        (
            "fleet.DistributedStrategy(durability='logs')",
            "StrategyError: strategy.durability: got 'logs', expected 'none' or "
            "'snapshot' or 'log'",
            True,
        ),
        ("fleet.data; raise OSError('no such luck')", "OSError: no such luck", False),
        # a peer has refused it, but the user has to change something
        (
            "from fleetlight.errors import TokenError; fleet.data; raise TokenError('x')",
            "TokenError: x",
            True,
        ),
    ],
)
def test_error_before_the_job_begins_is_reported(
    tmp_path: Path, body: str, error: str, is_lasting: bool
) -> None:
    """A wrong setting is no reason to restart the job."""
    word = tmp_path / "word.json"
    env = {**os.environ, "FLEET_ERROR_FILE": str(word)}
    ran = WarmScript(f"import fleetlight as fleet\n{body}", env)
    assert error in ran.communicate()[0]
    assert ran.returncode == (PERMANENT if is_lasting else ERROR)
    status = read(str(word))
    assert (status.error, status.permanent, status.caused_by_peer) == (error, is_lasting, False)


ALONE = {
    "a failing init": ("fleet.init(strategy=3)", PERMANENT),
    "no role": ("import os; os.environ['FLEET_ROLE'] = 'worker'; fleet.init()", PERMANENT),
    "a refused strategy": (
        "fleet.init(strategy=fleet.DistributedStrategy(durability='log', deadline_s=5.0,"
        " durability_configs={'away_s': 9.0}))",
        PERMANENT,
    ),
    "an error beside a thread": (
        "fleet.init()\nimport threading\n"
        "def end():\n threading.main_thread().join(); print('joined', flush=True); 1/0\n"
        "threading.Thread(target=end).start()\nraise PeerLostError('x')",
        PEER_FAILED,
    ),
    "a hook of the script": (
        "fleet.init()\nimport sys\nbefore = sys.excepthook\n"
        "sys.excepthook = lambda *error: before(*error)\nraise PlanError('x')",
        PERMANENT,
    ),
    # whatever calls the hook itself continues
    "an error in a console": (
        "fleet.init()\nimport code\nconsole = code.InteractiveConsole({'PlanError': PlanError})\n"
        "console.push('raise PlanError(1)')\nprint('joined')",
        0,
    ),
    "an error of a child": (
        "fleet.init()\nimport os, sys\npid = os.fork()\nif not pid: raise PlanError('x')\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) + 4)",
        5,
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_code_of_a_process_without_peers(case: str, tmp_path: Path) -> None:
    body, code = ALONE[case]
    reason = tmp_path / "reason.json"
    script = f"from fleetlight.errors import *\nimport fleetlight as fleet\n{body}"
    without = {name: text for name, text in os.environ.items() if not name.startswith("FLEET_")}
    ran = WarmScript(script, {**without, "FLEET_TERMINATION_LOG": str(reason)})
    output = ran.communicate()[0]
    assert ran.returncode == code, output
    assert ("joined" in output) == ("joined" in body)
    if code in (PEER_FAILED, PERMANENT):
        assert json.loads(reason.read_text())["code"] == code


WAIT = "fleet.barrier_worker()"
EXITS = [
    (0, "import sys; sys.exit(3)", 3, "exited with code 3"),
    (1, "exit(3)", 3, "exited with code 3"),
    (1, "import sys; sys.exit('no data')", 1, "SystemExit: no data"),
    (1, "raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    (1, "import argparse; argparse.ArgumentParser().error('x')", 2, "exited with code 2"),
]


@pytest.mark.parametrize(("culprit", "body", "code", "text"), EXITS)
def test_exit_with_an_error_is_a_failure(
    tmp_path: Path, culprit: int, body: str, code: int, text: str
) -> None:
    bodies = (body, WAIT) if culprit == 0 else (WAIT, body)
    codes, outputs, words = run_both(bodies, tmp_path)
    assert codes[culprit] == code, outputs
    assert codes[1 - culprit] == PEER_FAILED, outputs
    assert words[culprit].error == text
    assert words[culprit].caused_by_peer is False
    assert words[1 - culprit].caused_by_peer is True
    if culprit == 1:
        # worker 0 holds the store, so it can read the report
        assert "worker 1 (pid" in words[0].error
        assert text in words[0].error


ENDS = {
    "with a code": ("import sys; sys.exit()", "import sys; sys.exit(0)"),
    "for no process": (
        # a SystemExit that is caught ends nothing, whatever reads its code
        "import sys\ntry: sys.exit(3)\nexcept SystemExit as e: assert e.code == 3",
        # a SystemExit in a thread ends nothing either and is not reported
        "import sys, threading\none = threading.Thread(target=sys.exit, args=(3,))\n"
        "one.start()\none.join()",
    ),
    "of a child": ("import os, sys\nif os.fork() == 0: sys.exit(3)\nos.wait()",) * 2,
}


@pytest.mark.parametrize("how", ENDS)
def test_exit_without_an_error_ends_the_script_normally(tmp_path: Path, how: str) -> None:
    total = "print('sum', fleet.all_reduce(fleet.worker_index() + 1), flush=True)\n"
    first, second = ENDS[how]
    codes, outputs, words = run_both((total + first, total + second), tmp_path)
    assert codes == [0, 0], outputs
    assert [word.exiting for word in words] == [True, True]
    assert all("sum 3" in text and "Traceback" not in text for text in outputs)


@pytest.mark.parametrize("culprit", [0, 1])
def test_systemexit_raised_by_the_script_ends_the_job(tmp_path: Path, culprit: int) -> None:
    # imported by optimizers: its functions keep the process group of the import
    body = "import torch.distributed.nn.functional\nraise SystemExit(3)"
    codes, outputs, words = run_both((body, WAIT) if culprit == 0 else (WAIT, body), tmp_path)
    assert (codes[culprit], codes[1 - culprit]) == (3, PEER_FAILED), outputs
    assert words[1 - culprit].caused_by_peer is True
    # worker 0 holds the store: its report may vanish with it
    last = "left|does not reply" if culprit == 0 else "left"
    assert re.match(f"PeerLostError: .* worker {culprit} .*({last})", words[1 - culprit].error)


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "code", "text"),
    [("raise KeyError('x')", 1, "KeyError: 'x'"), ("sys.exit(3)", 3, "exited with code 3")],
)
def test_thread_of_the_script_does_not_delay_a_failure(
    tmp_path: Path, body: str, code: int, text: str
) -> None:
    thread = "import sys, threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    codes, outputs, words = run_both((WAIT, thread + body), tmp_path)
    assert codes == [PEER_FAILED, code], outputs
    assert "ending these threads: Thread-" in outputs[1]
    assert words[1].error == text
    assert words[0].caused_by_peer is True


FAILED_SAVE = """
import torch
fleet.distributed_model(torch.nn.Linear(1, 1))
fleet.save_persistables(__import__("os").environ["FLEET_ERROR_FILE"] + "/x", background=True)
"""


def test_failed_background_save_fails_a_script_without_stop_worker(tmp_path: Path) -> None:
    holder, port = reserved_port()
    (tmp_path / "0.json").write_text("in the way")
    with holder:
        process = run_script(FAILED_SAVE, 0, 1, port, tmp_path / "0.json")
        output = process.communicate()[0]
    assert process.returncode == PERMANENT, output
    assert "failed in the background" in output
    assert read(str(tmp_path / "0.json")).error.startswith("CheckpointError: ")


def test_script_without_stop_worker_leaves_the_job(tmp_path: Path) -> None:
    holder, port = reserved_port()
    with holder:
        body = "print('sum', fleet.all_reduce(fleet.worker_index() + 1))"
        processes = [run_script(body, i, 2, port, tmp_path / f"{i}.json") for i in range(2)]
        outputs = [p.communicate()[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    assert all("sum 3" in text for text in outputs)
    assert [read(str(w)).exiting for w in tmp_path.iterdir()] == [True, True]
    assert not any("Traceback" in text or "terminate" in text for text in outputs)


def test_script_may_destroy_the_process_group(tmp_path: Path) -> None:
    body = "import torch.distributed as dist\nfleet.barrier_worker()\ndist.destroy_process_group()"
    codes, outputs, words = run_both((body, body), tmp_path)
    assert codes == [0, 0], outputs
    assert [word.exiting for word in words] == [True, True]
    assert not any("Traceback" in text for text in outputs)
