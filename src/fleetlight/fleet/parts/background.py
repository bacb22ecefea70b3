# SPDX-License-Identifier: Apache-2.0
"""`BackgroundSave`: a checkpoint written while training goes on; its failure is never lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fleetlight.errors import CheckpointError, LostCheckpointError, PeerError
from fleetlight.observe.log import logger

_TELL_EVERY_S = 15.0


class BackgroundSave:
    """At most one write at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._failure: Exception | None = None

    def start(self, write: Callable[[], None], what: str) -> None:
        """Begin to write; `what` names it in errors. The write before must be finished."""
        assert self._thread is None, "finish() comes before the next start()"
        self._what = what
        # no daemon, so that a single process which fails still ends its write
        self._thread = threading.Thread(target=self._run, args=(write,), name="fleet-save")
        self._thread.start()

    def finish(self, forgives: type[Exception] | None = None) -> None:
        """Wait for the write, if there is one, and raise what failed in it, once.

        A failure that `forgives` names is no loss: what follows takes its place.
        """
        if self._thread is None:
            return
        # a disk may take as long as it takes, but not silently
        began = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_TELL_EVERY_S)
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
            logger.error("the %s failed, the next call will raise it: %s", self._what, error)
