# SPDX-License-Identifier: Apache-2.0
"""`BackgroundSave`: writes a checkpoint during training, in a thread beside the main thread.

The next call raises its failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fleetlight.errors import CheckpointError, LostCheckpointError, PeerError
from fleetlight.observe.log import logger

_WARN_EVERY_S = 15.0


class BackgroundSave:
    """At most one write at a time, in its own thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._failure: Exception | None = None

    def start(self, write: Callable[[], None], what: str) -> None:
        """Start a write, called `what` in errors; the previous write must be finished."""
        assert self._thread is None, "start() before finish() of the previous write"
        self._what = what
        # no daemon, so that a single process that fails still finishes its write
        self._thread = threading.Thread(target=self._run, args=(write,), name="fleet-save")
        self._thread.start()

    def finish(self, forgives: type[Exception] | None = None) -> None:
        """Wait for the write, if there is one, and raise its failure once.

        A failure of the class `forgives` is not raised, since the next save replaces this one.
        """
        if self._thread is None:
            return
        # there is no deadline for a slow disk, but a warning
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_WARN_EVERY_S)
            if self._thread.is_alive():
                seconds = time.monotonic() - began
                logger.warning("waiting for the %s for %.0f s", self._what, seconds)
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None and not (forgives and isinstance(failure, forgives)):
            kind = LostCheckpointError if isinstance(failure, PeerError) else CheckpointError
            raise kind(f"the {self._what} failed in the background: {failure}") from failure

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._failure = error
            logger.error("the %s failed; the next call raises the error: %s", self._what, error)


def in_main_thread() -> bool:
    """True in the main thread, where the script trains; other threads read ahead, save or push."""
    return threading.current_thread() is threading.main_thread()
