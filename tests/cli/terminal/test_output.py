# SPDX-License-Identifier: Apache-2.0
"""Tables and tones of the commands."""

import io
import sys

import pytest

from fleetlight.cli.terminal import output
from fleetlight.observe.console import Tone


@pytest.mark.parametrize(
    ("state", "tone"),
    [
        ("running", Tone.PLAIN),
        ("RUNNING", Tone.PLAIN),
        ("Active", Tone.PLAIN),
        ("ended with code 0", Tone.GOOD),
        ("COMPLETED", Tone.GOOD),
        ("Succeeded", Tone.GOOD),
        ("ended with code 1", Tone.BAD),
        ("killed by SIGKILL", Tone.BAD),
        ("lost", Tone.BAD),
        ("FAILED", Tone.BAD),
        ("NODE_FAIL", Tone.BAD),
        ("ImagePullBackOff", Tone.BAD),
        ("OUT_OF_MEMORY", Tone.BAD),
        ("PENDING", Tone.WARNING),
        ("starting", Tone.WARNING),
        ("unknown", Tone.WARNING),
    ],
)
def test_state_has_a_tone(state: str, tone: Tone) -> None:
    assert output.tone_of_state(state) is tone


def test_table_in_a_pipe_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    rows = [("process", "state"), ("worker 0", "lost")]
    output.print_table(rows, [Tone.BAD])
    assert capsys.readouterr().out == "process   state\nworker 0  lost\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.print_table(rows, [Tone.BAD])
    assert "\x1b[31mworker 0  lost\x1b[0m\n" in capsys.readouterr().out


class Terminal(io.StringIO):
    """A terminal that does not know its size."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


def test_error_is_red_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    output.complain("fleetrun", ValueError("no such flag"))
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    output.complain("fleetrun", ValueError("no such flag"))
    assert terminal.getvalue() == "\x1b[31mfleetrun: error:\x1b[0m no such flag\n"
    assert pipe.getvalue() == "fleetrun: error: no such flag\n"
