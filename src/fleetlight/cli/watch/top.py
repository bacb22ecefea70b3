# SPDX-License-Identifier: Apache-2.0
"""`fleetlight top`: what each process of a job does, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.text_view import text_of
from fleetlight.dashboard.view.job_view import JobView
from fleetlight.errors import ConfigError
from fleetlight.observe.console import wants_colour
from fleetlight.observe.telemetry.history import History
from fleetlight.observe.telemetry.snapshot import FOLDER

_EVERY_S = 1.0
#: to the first place of the screen, and clear what follows
_HOME, _CLEAR_LINE, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J"
#: a screen that keeps what was on the other one
_ALTERNATE, _NORMAL = "\x1b[?1049h", "\x1b[?1049l"


def add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    top = commands.add_parser(
        "top",
        help="show what each process of a job does, in a terminal",
        description="Shows steps, the time of each step, waits, staleness, tables and events of a "
        "job once a second, until it ends or you press Ctrl-C.",
    )
    top.add_argument("folder", metavar="LOGDIR", help="the log folder of the job")
    top.add_argument("--once", action="store_true", help="print it once, as into a pipe")
    top.set_defaults(command=_top)


def _top(found: argparse.Namespace) -> int:
    folder = Path(found.folder)
    if not (folder / FOLDER).is_dir():
        raise ConfigError(
            f"{folder} has no folder {FOLDER!r}; expected the log folder of a job that fleetrun "
            "has started"
        )
    is_terminal = sys.stdout.isatty()
    colour = wants_colour(os.environ, is_terminal=is_terminal)
    history, files, view = History(folder), JobFiles(folder), JobView()

    def read() -> Mapping[str, Any]:
        history.poll()
        view.update(history, files.read(), time.time())
        return view.whole()

    if found.once or not is_terminal:
        print(text_of(read(), shutil.get_terminal_size().columns if is_terminal else None, colour))
        return 0
    whole: Mapping[str, Any] | None = None
    with contextlib.suppress(KeyboardInterrupt), _alternate_screen():
        while whole is None or not view.facts.is_over:
            if whole is not None:
                time.sleep(_EVERY_S)
            whole = read()
            columns, lines = shutil.get_terminal_size()
            _show(text_of(whole, columns, colour, lines=lines))
    if whole is not None:
        print(text_of(whole, shutil.get_terminal_size().columns, colour))
    return 0


@contextlib.contextmanager
def _alternate_screen() -> Iterator[None]:
    """Leave the screen at the end as it was."""
    sys.stdout.write(_ALTERNATE)
    try:
        yield
    finally:
        sys.stdout.write(_NORMAL)
        sys.stdout.flush()


def _show(text: str) -> None:
    lines = f"{_CLEAR_LINE}\n".join(text.split("\n"))
    # without a new line at the end, which would scroll a full screen
    sys.stdout.write(f"{_HOME}{lines}{_CLEAR_LINE}{_CLEAR}")
    sys.stdout.flush()
