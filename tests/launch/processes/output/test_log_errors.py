# SPDX-License-Identifier: Apache-2.0
"""The error in the log of a process: its line, and its traceback."""

from __future__ import annotations

import pathlib

import pytest

import fleetlight
from fleetlight.launch.processes.failure import last_error, last_traceback

PACKAGE = pathlib.Path(fleetlight.__file__).parent

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
def test_last_error_of_a_log(log: str, found: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert last_error(file).startswith(found)
    assert bool(last_error(file)) == bool(found)


def test_long_line_is_truncated(tmp_path: pathlib.Path) -> None:
    (tmp_path / "log").write_text("ValueError: " + "x" * 1000)
    assert len(last_error(tmp_path / "log")) == 500


SECOND = TRACEBACK.partition("During")[2].partition("\n\n")[2].removesuffix("goodbye\n")


def traceback_of(tmp_path: pathlib.Path, log: str, reported: str | None) -> str:
    (tmp_path / "log").write_text(log)
    return last_traceback(tmp_path / "log", reported)


def test_traceback_is_that_of_the_reported_error(tmp_path: pathlib.Path) -> None:
    chain = TRACEBACK.removeprefix("step 1\n").removesuffix("goodbye\n").rstrip()
    assert traceback_of(tmp_path, TRACEBACK.replace("goodbye", "[fleet worker 1] x"), None) == chain
    caught = "Traceback (most recent call last):\n  File 'a'\nKeyError: 1\nstep 2\n"
    assert traceback_of(tmp_path, SECOND + caught, "ValueError: second") == SECOND.rstrip()
    assert traceback_of(tmp_path, caught, "ValueError: second") == ""
    assert traceback_of(tmp_path, caught, "exited with code 3") == ""
    assert traceback_of(tmp_path, "step 1\nstep 2\n", None) == ""
    assert traceback_of(tmp_path, SECOND + "--- restart 1 ---\nstep\n", None) == ""


def test_traceback_has_no_colours_and_no_ranks(tmp_path: pathlib.Path) -> None:
    coloured = SECOND.replace("ValueError", "\x1b[1;35mValueError\x1b[0m")
    ranked = "".join(f"[rank1]: {line}" for line in coloured.splitlines(keepends=True))
    assert traceback_of(tmp_path, ranked, "ValueError: second") == SECOND.rstrip()


def test_error_of_several_lines_is_whole_up_to_foreign_lines(tmp_path: pathlib.Path) -> None:
    text = SECOND.rstrip() + "\nthe second line\n[fleet worker 1] left\n"
    assert traceback_of(tmp_path, text, None) == SECOND.rstrip() + "\nthe second line"


def test_long_traceback_keeps_both_ends(tmp_path: pathlib.Path) -> None:
    frames = "".join(f'  File "t.py", line {n}, in f\n    f()\n' for n in range(60))
    log = f"Traceback (most recent call last):\n{frames}ValueError: deep\n"
    lines = traceback_of(tmp_path, log, "ValueError: deep").splitlines()
    assert len(lines) == 30
    assert lines[1] == '  File "t.py", line 0, in f'
    assert lines[6] == "  ... 93 more lines in the log ..."
    assert lines[-3:] == ['  File "t.py", line 59, in f', "    f()", "ValueError: deep"]


def test_long_chain_is_cut_to_its_last_error(tmp_path: pathlib.Path) -> None:
    frames = "".join(f'  File "t.py", line {n}, in f\n    f()\n' for n in range(20))
    log = TRACEBACK.replace('  File "t.py", line 1, in f\n    g()\n', frames)
    assert traceback_of(tmp_path, log, "ValueError: second") == SECOND.rstrip() + "\ngoodbye"


def test_stack_of_a_crash_is_that_of_the_current_thread(tmp_path: pathlib.Path) -> None:
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
    error: str, shown: list[str], tmp_path: pathlib.Path
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
