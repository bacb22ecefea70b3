# SPDX-License-Identifier: Apache-2.0
"""`fleetlight top`: what each process of a job does, in a terminal."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.text_view import text_of
from fleetlight.dashboard.view.job_view import JobView
from fleetlight.errors import ConfigError
from fleetlight.observe.console import wants_colour
from fleetlight.observe.figures.history import History
from fleetlight.observe.figures.snapshot import FOLDER

_EVERY_S = 1.0
#: to the first place of the screen, and clear what follows
_HOME, _CLEAR_LINE, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J"


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
    try:
        while True:
            history.poll()
            view.update(history, files.read(), time.time())
            columns = shutil.get_terminal_size().columns if is_terminal else None
            text = text_of(view.whole(), columns, colour)
            if found.once or not is_terminal:
                print(text)
                return 0
            lines = f"{_CLEAR_LINE}\n".join(text.split("\n"))
            sys.stdout.write(f"{_HOME}{lines}{_CLEAR_LINE}\n{_CLEAR}")
            sys.stdout.flush()
            if view.facts.is_over:
                return 0
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return 0
