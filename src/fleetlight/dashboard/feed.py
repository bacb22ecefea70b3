# SPDX-License-Identifier: Apache-2.0
"""`JobFeed`: follows the files of a job, and makes the messages of the page's clients.

A client has a cursor and no queue: it gets what it lacks when it can take it. So a browser that
stays away for an hour costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.view.facts import ProcessReading
from fleetlight.dashboard.view.job_view import Cursor, JobView
from fleetlight.observe.telemetry.history import History

#: how often files are read: a process that dies shows within this time
EVERY_S = 0.5
#: the same while no page is open
_IDLE_EVERY_S = 2.0
#: how often the view is made without news: a process without snapshots is silent
_RENEWED_EVERY_S = 5.0


class Message(NamedTuple):
    """A message to a client, and what the client then has."""

    #: `whole` or `news`
    kind: str
    data: bytes
    cursor: Cursor
    version: int


class JobFeed:
    """One view for all clients; its methods may be called by any thread."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._history, self._files, self._clock = History(folder), JobFiles(folder), clock
        self._lock = threading.Lock()
        self._view = JobView()
        #: grows whenever clients lack something
        self._version = 0
        self._renewed = -_RENEWED_EVERY_S
        self._changed = asyncio.Event()
        self._attended = asyncio.Event()
        self._clients = 0
        #: True once there will be no more news
        self.is_over = False

    def poll(self) -> bool:
        """Read what is new; returns whether anything is."""
        with self._lock:
            facts, now = self._files.read(), self._clock()
            is_new = self._history.poll()
            before = self._view.facts
            has_changed = (facts.processes, facts.is_over) != (before.processes, before.is_over)
            has_changed |= facts.description != before.description
            is_due = not facts.is_over and abs(now - self._renewed) >= _RENEWED_EVERY_S
            if not (is_new or has_changed or is_due):
                return False
            self._renewed = now
            self._view.update(self._history, facts, now)
            self._version += 1
            return True

    async def run(self) -> None:
        """Poll until this is cancelled."""
        woken = self._version
        while True:
            await asyncio.to_thread(self.poll)
            # another poll, such as that of a new client, may have found the news
            if self._version != woken:
                woken = self._version
                self._wake()
            if self._clients:
                await asyncio.sleep(EVERY_S)
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._attended.wait(), _IDLE_EVERY_S)

    @contextlib.contextmanager
    def client(self) -> Iterator[int]:
        """Poll often while a page is open; gives the number of open pages, this one included."""
        self._clients += 1
        self._attended.set()
        try:
            yield self._clients
        finally:
            self._clients -= 1
            if not self._clients:
                self._attended.clear()

    async def end(self) -> None:
        """Read the last news; clients get them, and then the end."""
        await asyncio.to_thread(self.poll)
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, version: int, timeout_s: float) -> None:
        """Wait until clients with this version lack something, at most for a time."""
        if version == self._version and not self.is_over:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)

    def message(self, last: Message | None) -> Message | None:
        """What a client lacks that has the last message; None: nothing."""
        with self._lock:
            if last is not None and last.version == self._version:
                return None
            news = None if last is None else self._view.news(last.cursor)
            kind, content = ("whole", self._view.whole()) if news is None else ("news", news)
            return Message(kind, msgspec.json.encode(content), self._view.cursor, self._version)

    def newest(self) -> list[ProcessReading]:
        """The newest metrics of each process, after reading what is new."""
        self.poll()
        with self._lock:
            return self._view.readings(self._clock())

    @property
    def picture(self) -> str | None:
        """The picture of the job's program as SVG."""
        with self._lock:
            return self._files.picture
