# SPDX-License-Identifier: Apache-2.0
"""Output whose traceback is held back until the cause of a failure is known."""

import pytest

from fleetlight.launch.processes.output.held import HeldOutput

TRACEBACK = b"Traceback (most recent call last):\n  File 'a'\nPeerLostError: worker 1\n"


class Output:
    """A screen, a clock, and whether the process is known to fail."""

    def __init__(self) -> None:
        self.shown = b""
        self.now = 10.0
        self.is_failing = False
        self.held = HeldOutput(self.show, lambda: self.is_failing, lambda: self.now)

    def show(self, data: bytes) -> None:
        self.shown += data


@pytest.fixture
def output() -> Output:
    return Output()


@pytest.mark.parametrize(
    "traceback",
    [
        TRACEBACK,
        b"[rank0]: " + TRACEBACK,
        b"\x1b[31m" + TRACEBACK,
        b"Fatal Python error: Aborted\n\nCurrent thread\n",
    ],
)
def test_traceback_and_all_after_it_is_held(output: Output, traceback: bytes) -> None:
    output.held(b"step 1\nstep 2\n" + traceback)
    output.held(b"[fleet worker 0] ending\n")
    output.held.pump()
    assert output.shown == b"step 1\nstep 2\n"
    assert output.held.discard() == traceback + b"[fleet worker 0] ending\n"
    output.held(b"later\n")
    assert output.shown.endswith(b"step 2\nlater\n")


def test_process_that_continues_shows_its_traceback(output: Output) -> None:
    output.held(TRACEBACK)
    output.held(b"caught it\n")
    output.now += 1.9
    output.held.pump()
    assert output.shown == b""
    output.now += 0.2
    output.held.pump()
    assert output.shown == TRACEBACK + b"caught it\n"


def test_failing_process_shows_nothing_while_it_ends(output: Output) -> None:
    output.held(TRACEBACK)
    output.is_failing = True
    output.now += 100
    output.held.pump()
    assert output.shown == b""
    output.held.release()
    assert output.shown == TRACEBACK


def test_first_line_may_come_in_pieces(output: Output) -> None:
    for n in range(len(TRACEBACK)):
        output.held(TRACEBACK[n : n + 1])
    assert output.shown == b""
    assert output.held.discard() == TRACEBACK


def test_text_that_only_begins_like_a_traceback_is_shown(output: Output) -> None:
    output.held(b"Trace")
    output.held(b" of a matrix\n")
    assert output.shown == b"Trace of a matrix\n"
    output.held(b"F")
    output.held.pump()
    assert output.shown.endswith(b"\nF")


@pytest.mark.parametrize("bar", [b" 50%\r", b" 50%\r\x1b[2K", b"done\n\x1b[?25h"])
def test_traceback_may_follow_a_progress_bar(output: Output, bar: bytes) -> None:
    output.held(bar)
    output.held(TRACEBACK)
    assert output.shown == bar
    output.held.discard()
    output.held(bar + TRACEBACK)
    # what shows the cursor again reaches the terminal
    assert output.shown == bar + bar
    assert output.held.discard() == TRACEBACK


def test_traceback_within_a_line_is_text(output: Output) -> None:
    output.held(b"it said: ")
    output.held(TRACEBACK)
    assert output.shown == b"it said: " + TRACEBACK
