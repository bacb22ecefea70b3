# SPDX-License-Identifier: Apache-2.0
"""Kills its own process at critical moments: within a write, between a write and its reply.

A kill from outside rarely hits the few microseconds that matter.
"""

import functools
import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import Any

from fleetlight.ps.journal import folder, journal, segment
from fleetlight.ps.transport import frames
from fleetlight.ps.worker.replay import replay_log as answers
from fleetlight.ps.worker.replay import worker_journal as redo

#: an incarnation dies within so many moments
MOMENTS = 1500


class SelfKill:
    """Kills its own process at a moment that the seed and the incarnation determine."""

    def __init__(self, seed: str, moments: int = MOMENTS) -> None:
        chance = random.Random(seed)
        self._left = chance.randrange(moments)
        self._part = chance.random()
        self._write = os.pwritev
        self._is_installed = False

    def install(self) -> None:
        """Count moments from now on; further calls do nothing."""
        if self._is_installed:
            return
        self._is_installed = True
        os.pwritev = self._pwritev
        for owner, name in (
            (frames.Frames, "send"),
            (journal.Journal, "put"),
            (journal.Journal, "rotate"),
            (segment.Segment, "__init__"),
            (folder.Folder, "complete"),
            (folder.Folder, "drop_before"),
            (redo.WorkerJournal, "commit"),
            (answers.ReplayLog, "once"),
        ):
            setattr(owner, name, self._around(getattr(owner, name)))

    def moment(self) -> None:
        """Count a moment, and die if it is the last one."""
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _around(self, act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def counted(*arguments: Any, **more: Any) -> Any:
            self.moment()
            result = act(*arguments, **more)
            self.moment()
            return result

        return counted

    def _pwritev(self, fd: int, buffers: Sequence[Any], offset: int, *more: Any) -> int:
        if not self._left:
            # write a part of the data first
            data = b"".join(bytes(part) for part in buffers)
            self._write(fd, [data[: int(self._part * len(data))]], offset)
        self.moment()
        return self._write(fd, buffers, offset, *more)
