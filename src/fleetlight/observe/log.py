# SPDX-License-Identifier: Apache-2.0
"""The logger of Fleetlight, and one line per message on stderr for programs without logging."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from fleetlight.observe.console import Tone, fitted, painted, wants_colour

logger = logging.getLogger("fleetlight")


def configure(
    prefix: str, level: int | str = logging.INFO, environment: Mapping[str, str] | None = None
) -> None:
    """Show messages as `[fleet <prefix>] message`, unless the program handles logging itself.

    Call it again to change prefix or level. The environment says whether a terminal gets colours.
    """
    if _handled_by_others():
        return
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(_StderrHandler(prefix, environment or {}))
    logger.setLevel(level)


class _StderrHandler(logging.Handler):
    def __init__(self, prefix: str, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._prefix = prefix
        self._environment = environment
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        # The program may have set up its own logging after us: then every line would come twice.
        if _handled_by_others():
            return
        try:
            # One write for the whole line: lines of several processes must not mix.
            sys.stderr.write(self._line(record))
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        """The line; in a terminal the prefix is dim, and warnings have a colour."""
        prefix = f"[fleet {self._prefix}{self._child()}]"
        # scripts replace sys.stderr
        is_terminal = bool(getattr(sys.stderr, "isatty", lambda: False)())
        colour = wants_colour(self._environment, is_terminal=is_terminal) and is_terminal
        tone = Tone.WARNING if record.levelno >= logging.WARNING else Tone.PLAIN
        whole = f"{prefix} {self.format(record)}"
        text = fitted(whole, _columns() if is_terminal else None).removeprefix(prefix)
        return f"{painted(prefix, Tone.DIM, colour)}{painted(text, tone, colour)}\n"

    def _child(self) -> str:
        """Forked processes, such as those of a DataLoader, inherit the prefix: tell them apart."""
        pid = os.getpid()
        return "" if pid == self._pid else f", child {pid}"


def _columns() -> int | None:
    """The width of the terminal, if it knows it."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError):
        return None


def _handled_by_others() -> bool:
    handlers = logger.handlers + (logging.getLogger().handlers if logger.propagate else [])
    return any(
        not isinstance(handler, (_StderrHandler, logging.NullHandler)) for handler in handlers
    )
