# SPDX-License-Identifier: Apache-2.0
"""The pseudo terminal of worker 0."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetlight.launch.processes.output.terminal import PtyFollower, plain


@pytest.mark.parametrize(
    ("written", "logged"),
    [
        (b"plain", b"plain"),
        (b"\x1b[1;31mred\x1b[0m", b"red"),
        (b"\x1b]0;title\x07text", b"text"),
        (b"\r 10%\r 20%\r100%", b"100%"),
        (b"windows\r", b"windows"),
        (b"\x1b[2K\r\x1b[?25lbar\x1b[?25h", b"bar"),
    ],
)
def test_logged_line_has_its_final_text(written: bytes, logged: bytes) -> None:
    assert plain(written) == logged


CODE = """
import os, sys
print(sys.stdout.isatty(), os.get_terminal_size().columns)
sys.stdout.write("\\r50%")
sys.stdout.write("\\r\\x1b[1m100%\\x1b[0m\\nno end of line")
"""


def test_process_has_a_terminal_and_its_last_output_is_logged(tmp_path: Path) -> None:
    shown: list[bytes] = []
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    follower = PtyFollower(log, shown.append, lambda: (77, 33))
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=follower.slave, stderr=follower.slave
    )
    follower.started()
    assert process.wait(timeout=60) == 0
    follower.close()
    assert b"".join(shown).startswith(b"True 77\n\r50%\r\x1b[1m100%\x1b[0m\nno end of line")
    assert (tmp_path / "log").read_text() == "True 77\n100%\nno end of line\n"


@pytest.mark.parametrize(("more", "is_shown"), [("", True), ("\\x1b[?25h", False)])
def test_cursor_of_a_killed_process_is_shown(more: str, is_shown: bool, tmp_path: Path) -> None:
    shown: list[bytes] = []
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    follower = PtyFollower(log, shown.append, lambda: (77, 33))
    code = f'import os; os.write(1, b"\\x1b[?25l50%{more}"); os.abort()'
    process = subprocess.Popen([sys.executable, "-c", code], stdout=follower.slave)
    follower.started()
    assert process.wait(timeout=60) < 0
    follower.close()
    assert (shown[-1] == b"\x1b[?25h") is is_shown
