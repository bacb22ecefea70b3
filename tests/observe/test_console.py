# SPDX-License-Identifier: Apache-2.0
"""Colours, and lines that fit a terminal."""

import pytest

from fleetlight.observe.console import Tone, aligned, fitted, painted, wants_colour, without_control


@pytest.mark.parametrize(
    ("environment", "is_terminal", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": ""}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "3"}, True, True),
    ],
)
def test_users_choose_colours(environment: dict[str, str], is_terminal: bool, wanted: bool) -> None:
    assert wants_colour(environment, is_terminal=is_terminal) is wanted


def test_paint_leaves_no_trace_without_colours() -> None:
    assert painted("x", Tone.BAD, False) == "x"
    assert painted("x", Tone.PLAIN, True) == "x"
    red = painted("x", Tone.BAD, True)
    assert red == "\x1b[31mx\x1b[0m"
    assert without_control(red.encode()) == b"x"


def test_only_narrow_terminals_get_broken_lines() -> None:
    text = (
        "worker 1 of 2 exited with code 1 after 2.0 s (log: /a/very/long/path/to/log/workerlog.1)"
    )
    assert fitted(text, None) == fitted(text, 80) == text
    lines = fitted(text, 40).split("\n")
    assert lines[0] == "worker 1 of 2 exited with code 1 after"
    assert "  /a/very/long/path/to/log/workerlog.1)" in lines
    assert " ".join(line.strip() for line in lines) == text


ROWS = [
    ("process", "state", "machine", ""),
    ("worker 0", "running", "node1", "pid 1"),
    ("worker 1", "lost", "", ""),
]


def test_table_is_aligned_where_it_fits() -> None:
    table = "process   state    machine\nworker 0  running  node1    pid 1\nworker 1  lost"
    assert aligned(ROWS) == aligned(ROWS, 33) == table


def test_table_is_stacked_in_a_narrow_terminal() -> None:
    assert aligned(ROWS, 32).split("\n") == [
        "worker 0",
        "  state: running",
        "  machine: node1",
        "  pid 1",
        "worker 1",
        "  state: lost",
    ]


def test_rows_have_the_colours_of_their_tones() -> None:
    tones = (Tone.DIM, Tone.PLAIN, Tone.BAD)
    assert aligned(ROWS, None, tones).split("\n")[2] == "\x1b[31mworker 1  lost\x1b[0m"
    stacked = aligned(ROWS, 20, tones).split("\n")
    assert stacked[-2:] == ["\x1b[31mworker 1\x1b[0m", "\x1b[31m  state: lost\x1b[0m"]
