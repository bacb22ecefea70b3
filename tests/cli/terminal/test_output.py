# SPDX-License-Identifier: Apache-2.0
"""Tables and tones of the commands."""

from __future__ import annotations

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
