# SPDX-License-Identifier: Apache-2.0
"""The logger of Fleetlight, and one line per message on stderr for programs without logging."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("fleetlight")


def configure(prefix: str, level: int | str = logging.INFO) -> None:
    """Show messages as `[fleet <prefix>] message`, unless the program handles logging itself.

    Call it again to change prefix or level.
    """
    if _handled_by_others():
        return
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(_StderrHandler(prefix))
    logger.setLevel(level)


class _StderrHandler(logging.Handler):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        # The program may have set up its own logging after us: then every line would come twice.
        if _handled_by_others():
            return
        try:
            # One write for the whole line: lines of several processes must not mix.
            sys.stderr.write(f"[fleet {self._prefix}{self._child()}] {self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def _child(self) -> str:
        """Forked processes, such as those of a DataLoader, inherit the prefix: tell them apart."""
        pid = os.getpid()
        return "" if pid == self._pid else f", child {pid}"


def _handled_by_others() -> bool:
    handlers = logger.handlers + (logging.getLogger().handlers if logger.propagate else [])
    return any(
        not isinstance(handler, (_StderrHandler, logging.NullHandler)) for handler in handlers
    )
