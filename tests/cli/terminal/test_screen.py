# SPDX-License-Identifier: Apache-2.0
"""Standard output."""

import os
import sys

import pytest

from fleetlight.cli.terminal.screen import StandardOutput


def test_lines_of_the_launcher_start_on_a_new_line(capfd: pytest.CaptureFixture[str]) -> None:
    screen = StandardOutput()
    screen.show(b"50%")
    screen.say("failed")
    screen.say("really")
    assert capfd.readouterr().out == "50%\nfleetrun: failed\nfleetrun: really\n"


def test_a_pipe_is_no_terminal() -> None:
    assert StandardOutput().size is None


def test_a_closed_pipe_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        screen = StandardOutput()
        os.close(read)
        screen.say("not shown")
        screen.say("nor this")
        monkeypatch.undo()
