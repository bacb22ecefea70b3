# SPDX-License-Identifier: Apache-2.0
"""What processes leave behind for the launcher when they stop."""

from __future__ import annotations

import json
import pathlib
import signal
from typing import Any

import pytest

from fleetlight.launch.processes.stop import RESUME_CODE, Stop, forget_stops, read_stop, stops, told


def left(path: pathlib.Path, word: Any) -> str:
    path.write_text(json.dumps(word))
    return str(path)


def test_a_stop_is_a_code_and_a_word(tmp_path: pathlib.Path) -> None:
    word = {"time": 1.0, "leaving": True, "stopped": {"step": 7, "folder": "/c"}}
    file = left(tmp_path / "w", word)
    assert read_stop(file, RESUME_CODE) == Stop(7, "/c")
    # what came behind it went wrong
    for status in (1, -signal.SIGABRT):
        assert read_stop(file, status) is None


def test_one_that_is_killed_between_its_stop_and_its_goodbye_has_stopped(
    tmp_path: pathlib.Path,
) -> None:
    file = left(tmp_path / "w", {"leaving": True, "stopped": {"step": 7, "folder": "/c"}})
    assert read_stop(file, -signal.SIGKILL) == Stop(7, "/c")
    assert read_stop(left(tmp_path / "x", {"leaving": True}), -signal.SIGKILL) is None


@pytest.mark.parametrize(
    "word", [{}, [], {"stopped": True}, {"stopped": {"step": "x", "folder": "c"}}]
)
def test_a_script_may_have_a_code_75_of_its_own(tmp_path: pathlib.Path, word: Any) -> None:
    assert read_stop(left(tmp_path / "w", word), RESUME_CODE) is None
    assert read_stop(str(tmp_path / "none"), RESUME_CODE) is None


def test_who_saves_says_so_beside_its_error_file(tmp_path: pathlib.Path) -> None:
    file = left(tmp_path / "w", {"returning": True})
    assert not stops(file)
    left(tmp_path / "w.stops", {})
    assert stops(file)
    forget_stops(file)
    assert not stops(file)
    forget_stops(file)


def test_the_last_line_says_how_to_go_on() -> None:
    line = told(Stop(7, "/c"))
    assert line.startswith("stopped at step 7, saved in /c; go on with fleetrun --checkpoint /c")
    assert "--resume" in line
