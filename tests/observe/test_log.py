# SPDX-License-Identifier: Apache-2.0
"""Log lines."""

import contextlib
import io
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fleetlight.observe import log


@contextlib.contextmanager
def no_logging() -> Iterator[None]:
    """A program without logging of its own: removes the handlers of pytest."""
    loggers = (log.logger, logging.getLogger())
    before = [(logger.handlers, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    try:
        yield
    finally:
        for logger, (handlers, level) in zip(loggers, before, strict=True):
            logger.handlers = handlers
            logger.setLevel(level)


@no_logging()
def test_a_line_carries_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("worker 0")
    log.logger.info("all_reduce: %d -> %d", 161, 5)
    log.logger.debug("unseen")
    assert capsys.readouterr() == ("", "[fleet worker 0] all_reduce: 161 -> 5\n")


@no_logging()
def test_the_last_configuration_wins_and_lines_do_not_double(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.configure("worker")
    log.configure("worker 3", "WARNING")
    log.logger.info("unseen")
    log.logger.warning("seen")
    assert capsys.readouterr().err == "[fleet worker 3] seen\n"


@no_logging()
def test_stderr_is_looked_up_for_each_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("worker 0")
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    log.logger.info("moved")
    assert capsys.readouterr() == ("[fleet worker 0] moved\n", "")


@no_logging()
def test_a_traceback_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("worker 0")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.logger.exception("failed")
    assert "ZeroDivisionError" in capsys.readouterr().err


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@no_logging()
def test_a_program_with_logging_keeps_its_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    log.logger.addHandler(recorder)
    log.logger.setLevel(logging.ERROR)
    log.configure("worker 0", logging.DEBUG)
    assert (log.logger.handlers, log.logger.level) == ([recorder], logging.ERROR)
    log.logger.error("theirs")
    assert (recorder.messages, capsys.readouterr().err) == (["theirs"], "")


@no_logging()
def test_logging_set_up_later_takes_over(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("worker 0")
    logging.getLogger().addHandler(recorder := Recorder())
    log.logger.info("theirs")
    assert (recorder.messages, capsys.readouterr().err) == (["theirs"], "")


@no_logging()
def test_a_null_handler_is_not_logging(capsys: pytest.CaptureFixture[str]) -> None:
    log.logger.addHandler(logging.NullHandler())
    log.configure("worker 0")
    log.logger.info("seen")
    assert capsys.readouterr().err == "[fleet worker 0] seen\n"


@pytest.mark.skipif(sys.platform != "linux", reason="forking is the default on Linux only")
def test_lines_of_forked_processes_name_the_child() -> None:
    code = (
        "import multiprocessing\n"
        "from fleetlight.observe import log\n"
        "log.configure('worker 0')\n"
        "log.logger.info('parent')\n"
        "child = multiprocessing.get_context('fork').Process(target=log.logger.info, args=['hi'])\n"
        "child.start(); child.join(); print(child.pid)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    child = f"[fleet worker 0, child {done.stdout.strip()}] hi"
    assert done.stderr.splitlines() == ["[fleet worker 0] parent", child]


class Terminal(io.StringIO):
    """A terminal that does not know its size."""

    def isatty(self) -> bool:
        return True


@no_logging()
@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, "\x1b[2m[fleet worker 0]\x1b[0m\x1b[33m careful\x1b[0m\n"),
        ({"NO_COLOR": "1"}, "[fleet worker 0] careful\n"),
    ],
)
def test_terminal_gets_coloured_lines(
    environment: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    log.configure("worker 0", environment=environment)
    log.logger.warning("careful")
    assert terminal.getvalue() == shown


@no_logging()
def test_log_file_gets_no_colours_even_if_forced(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("worker 0", environment={"FORCE_COLOR": "1"})
    log.logger.warning("careful")
    assert capsys.readouterr().err == "[fleet worker 0] careful\n"
