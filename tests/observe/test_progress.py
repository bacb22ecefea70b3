# SPDX-License-Identifier: Apache-2.0
"""Progress on terminals and in log files."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.errors import LiveError

from fleetlight.errors import ConfigError
from fleetlight.observe import log
from fleetlight.observe.console import Tone, aligned, fitted, painted, wants_colour, without_control
from fleetlight.observe.progress import Progress, fitting

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Loss:
    """A tensor that records when it is read."""

    shape = ()

    def __init__(self, clock: FakeClock) -> None:
        self.read_at: list[float] = []
        self._clock = clock

    def detach(self) -> Loss:
        return self

    def item(self) -> float:
        self.read_at.append(self._clock.now)
        return 1.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def recorded(terminal: bool, term: str = "xterm") -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, _environ={"TERM": term})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def lines() -> Console:
    return recorded(terminal=False)


@pytest.fixture
def terminal() -> Console:
    return recorded(terminal=True)


def batches(count: int, size: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(size, 3), torch.zeros(size)) for _ in range(count)]


def run(progress: Progress[Any], clock: FakeClock, seconds: float, **values: Any) -> None:
    for _ in progress:
        clock.now += seconds
        progress.show(**values)


def test_items_pass_through_unchanged(lines: Console) -> None:
    items = batches(3)
    assert all(a is b for a, b in zip(Progress(items, console=lines), items, strict=True))


def test_plain_lines_every_few_seconds_and_at_the_end(clock: FakeClock, lines: Console) -> None:
    run(Progress(batches(9), console=lines, clock=clock), clock, 2.0, loss=0.41234)
    assert written(lines).splitlines() == [
        "step 3/9  loss 0.4123  32 samples/s  ETA 0:12",
        "step 6/9  loss 0.4123  32 samples/s  ETA 0:06",
        "step 9/9  loss 0.4123  32 samples/s  ETA 0:00",
        "step 9/9  loss 0.4123  32 samples/s  took 0:18",
    ]


def test_lines_show_recent_speed_and_a_summary_the_total(clock: FakeClock, lines: Console) -> None:
    progress = Progress(batches(102), console=lines, clock=clock)
    for step, _ in enumerate(progress):
        clock.now += 600 if step == 0 else 6
    text = written(lines).splitlines()
    assert text[0] == "step 1/102  0.11 samples/s  ETA 16:50:00"
    assert text[50] == "step 51/102  11 samples/s  ETA 5:06"
    assert text[-1] == "step 102/102  5.4 samples/s  took 20:06"


def test_a_tensor_is_read_only_when_it_is_shown(clock: FakeClock, lines: Console) -> None:
    loss = Loss(clock)
    run(Progress(batches(20), console=lines, clock=clock), clock, 1.0, loss=loss)
    assert loss.read_at == [105, 110, 115, 120, 120]


def test_a_shown_loss_does_not_keep_its_graph(lines: Console) -> None:
    progress = Progress(batches(1), console=lines)
    weight = torch.ones(1, requires_grad=True)
    for _ in progress:
        progress.show(loss=weight * 2)
    kept = progress._values["loss"]
    assert isinstance(kept, torch.Tensor)
    assert kept.grad_fn is None


def test_values_of_many_kinds_are_shown(clock: FakeClock, lines: Console) -> None:
    values = {"loss": torch.tensor([float("nan")]), "epoch": 3, "lr": 1e-5, "note": "[red]warm"}
    run(Progress([None], console=lines, clock=clock), clock, 4.0, **values)
    assert written(lines) == (
        "step 1/1  loss nan  epoch 3  lr 1e-05  note [red]warm  0.25 steps/s  took 0:04\n"
    )


def test_a_value_must_be_one_number(lines: Console) -> None:
    progress = Progress(batches(1), console=lines)
    with pytest.raises(ConfigError, match=r"show\(loss=\.\.\.\): got a tensor of shape \(4,\)"):
        progress.show(loss=torch.zeros(4))


@pytest.mark.parametrize(
    ("batch", "speed"),
    [
        ({"x": torch.zeros(8, 2)}, "4 samples/s"),
        ((torch.tensor(1.0), [None, torch.zeros(6)]), "3 samples/s"),
        ("text", "0.5 steps/s"),
        ([1, 2], "0.5 steps/s"),
    ],
)
def test_the_batch_size_is_found(batch: Any, speed: str, clock: FakeClock, lines: Console) -> None:
    run(Progress([batch], console=lines, clock=clock), clock, 2.0)
    assert f"  {speed}  " in written(lines)


def test_the_batch_size_can_be_given(clock: FakeClock, lines: Console) -> None:
    run(Progress(batches(2), samples_per_step=1000, console=lines, clock=clock), clock, 0.5)
    assert "  2000 samples/s  " in written(lines)


def test_streams_have_no_length(clock: FakeClock, lines: Console) -> None:
    progress = Progress(iter(batches(3)), console=lines, clock=clock)
    with pytest.raises(TypeError, match="total="):
        len(progress)
    run(progress, clock, 5.0)
    assert written(lines).splitlines()[0] == "step 1  13 samples/s"


def test_a_stream_may_have_a_total(clock: FakeClock, lines: Console) -> None:
    progress = Progress(iter(batches(3)), total=2, console=lines, clock=clock)
    assert len(progress) == 2
    run(progress, clock, 5.0)
    assert [line.split("  ")[-1] for line in written(lines).splitlines()] == [
        "ETA 0:05",
        "ETA 0:00",
        "13 samples/s",  # more steps than announced: no ETA
        "took 0:15",
    ]


def test_every_epoch_starts_over(clock: FakeClock, lines: Console) -> None:
    progress = Progress(batches(2), console=lines, clock=clock)
    run(progress, clock, 1.0, loss=1)
    run(progress, clock, 1.0)
    assert written(lines).splitlines() == [
        "step 2/2  loss 1  64 samples/s  took 0:02",
        "step 2/2  64 samples/s  took 0:02",
    ]


def test_an_empty_loader_shows_the_summary(lines: Console, clock: FakeClock) -> None:
    assert list(Progress([], console=lines, clock=clock)) == []
    assert written(lines) == "step 0/0  took 0:00\n"


def test_other_workers_show_nothing(lines: Console, clock: FakeClock) -> None:
    items = batches(3)
    progress = Progress(items, rank0=False, console=lines, clock=clock)
    run(progress, clock, 60.0, loss=torch.zeros(4))
    assert [item is own for item, own in zip(progress, items, strict=True)] == [True] * 3
    assert written(lines) == ""


def test_a_terminal_shows_a_live_bar(clock: FakeClock, terminal: Console) -> None:
    run(
        Progress(batches(4), console=terminal, clock=clock),
        clock,
        1.0,
        loss=torch.tensor(0.5),
        on="[b]",
    )
    text = written(terminal)
    for part in ("━", "step 1/4  loss 0.5  on [b]  64 samples/s  ETA 0:03", "took 0:04"):
        assert part in text
    assert_clean(text)


def assert_clean(text: str) -> None:
    """The cursor is visible again, at the start of a new line."""
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.index(HIDE_CURSOR) < text.index(SHOW_CURSOR)
    assert text.rstrip(SHOW_CURSOR).endswith("\n")


def test_the_bar_is_drawn_ten_times_a_second_at_most(clock: FakeClock, terminal: Console) -> None:
    loss = Loss(clock)
    run(Progress(batches(100), console=terminal, clock=clock), clock, 0.0625, loss=loss)
    assert len(loss.read_at) == 51


def test_early_break_leaves_the_terminal_clean(clock: FakeClock, terminal: Console) -> None:
    for _ in Progress(batches(4), console=terminal, clock=clock):
        clock.now += 3
        break
    text = written(terminal)
    assert "step 1/4  21 samples/s  took 0:03" in text
    assert_clean(text)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_loop_leaves_the_terminal_clean(
    error: type[BaseException], terminal: Console
) -> None:
    def train() -> None:
        for _ in Progress(batches(4), console=terminal):
            raise error

    with pytest.raises(error):
        train()
    assert_clean(written(terminal))


def test_an_error_of_the_loader_is_raised(terminal: Console) -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(Progress(loader(), console=terminal))
    assert_clean(written(terminal))


def test_a_value_that_cannot_be_read_leaves_the_terminal_clean(terminal: Console) -> None:
    class Broken:
        def item(self) -> float:
            raise RuntimeError("device lost")

    progress = Progress(batches(2), console=terminal)
    iterator = iter(progress)
    next(iterator)
    progress.show(loss=Broken())
    with pytest.raises(RuntimeError, match="device lost"):
        list(iterator)
    assert_clean(written(terminal))


def test_a_bar_of_epochs_may_contain_bars_of_batches(terminal: Console, clock: FakeClock) -> None:
    outer = Progress(range(2), console=terminal, clock=clock)
    for _ in outer:
        run(Progress(batches(3), console=terminal, clock=clock), clock, 1.0)
    text = written(terminal)
    assert text.count("step 3/3") >= 2
    assert "step 2/2" in text


def test_a_second_live_display_writes_lines_if_refused(
    terminal: Console, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(live: object) -> None:
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(terminal, "set_live", refuse)
    run(Progress(batches(1), console=terminal, clock=clock), clock, 1.0)
    assert written(terminal).endswith("step 1/1  64 samples/s  took 0:01\n")


def test_a_dumb_terminal_gets_lines(clock: FakeClock) -> None:
    dumb = recorded(terminal=True, term="dumb")
    run(Progress(batches(1), console=dumb, clock=clock), clock, 1.0)
    assert written(dumb) == "step 1/1  64 samples/s  took 0:01\n"


def test_lines_go_to_stderr_and_rich_is_imported_late() -> None:
    code = (
        "import sys\n"
        "from fleetlight.observe.progress import Progress\n"
        "assert list(Progress([1], rank0=False)) == [1]\n"
        "assert 'rich' not in sys.modules and 'torch' not in sys.modules\n"
        "list(Progress([1]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    assert done.stderr.startswith("step 1/1  ")


def test_long_lines_are_not_folded(clock: FakeClock) -> None:
    narrow = Console(file=io.StringIO(), width=20, _environ={})
    values: Iterable[str] = "abcdefgh"
    run(Progress([1], console=narrow, clock=clock), clock, 1.0, **dict.fromkeys(values, 1.0))
    assert len(written(narrow).splitlines()) == 1


def test_staleness_is_asked_every_few_seconds_and_shown(clock: FakeClock, lines: Console) -> None:
    asked: list[float] = []

    def staleness() -> float | None:
        asked.append(clock.now)
        return None if len(asked) == 1 else 2.94

    run(Progress(batches(8), console=lines, clock=clock, staleness=staleness), clock, 3.0, loss=0.5)
    assert asked == [106, 112, 118, 124]
    assert written(lines).splitlines()[:2] == [
        "step 2/8  loss 0.5  21 samples/s  ETA 0:18",
        "step 4/8  loss 0.5  21 samples/s  ETA 0:12  staleness 2.9",
    ]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "step 2/8  loss 0.5  21 samples/s  ETA 0:18  staleness 2.9"),
        (56, "step 2/8  loss 0.5  21 samples/s  ETA 0:18"),
        (40, "step 2/8  loss 0.5  21 samples/s"),
        (1, "step 2/8"),
    ],
)
def test_line_loses_its_last_parts_where_they_do_not_fit(columns: int, shown: str) -> None:
    parts = ["step 2/8", "loss 0.5", "21 samples/s", "ETA 0:18", "staleness 2.9"]
    assert fitting(parts, columns) == shown


def test_narrow_terminal_has_one_line_without_a_bar(clock: FakeClock) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, _environ={"TERM": "xterm"})
    run(Progress(batches(8), console=console, clock=clock), clock, 3.0, loss=0.5)
    text = without_control(written(console).encode()).decode()
    assert "step 2/8  loss 0.5  21 samples/s" in text
    assert "━" not in text
    assert max(map(len, text.replace("\r", "\n").split("\n"))) <= 40


def test_forced_colours_draw_no_bar_into_a_pipe() -> None:
    code = (
        "from fleetlight.observe.progress import Progress\nfor x in Progress(range(3)):\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "FORCE_COLOR": "1"},
        timeout=60,
    )
    assert done.stderr.splitlines()[-1].startswith("step 3/3")
    assert "\x1b" not in done.stderr


# -- colours, and lines that fit a terminal


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


# -- log lines


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
