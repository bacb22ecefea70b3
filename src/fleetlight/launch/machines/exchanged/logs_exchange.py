# SPDX-License-Identifier: Apache-2.0
"""`LogsExchange`: node 0 gets copies of the logs that other machines write.

They travel in the store, beside metrics. Node 0 confirms how far it has each log, and a machine
sends what follows. A log that grows faster loses its middle on node 0, and a line there says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from fleetlight.launch.machines.exchanged.heartbeats import Counters
from fleetlight.observe.log import logger

_NAME = re.compile(r"(?:worker|server)log\.\d{1,6}")
#: what a machine sends at a time; on a slow link less, since heartbeats use the same connection
_MAX_BYTES, _MIN_BYTES = 64 << 10, 4 << 10
_SLOW_S = 0.5
#: how many logs share a message
_MAX_LOGS = 16
#: how much of a log may be missing on node 0 before its middle is left out
_BEHIND_BYTES = 1 << 20


class _LogPart(msgspec.Struct, frozen=True):
    """A part of a log, from byte `start` on."""

    start: int
    data: bytes
    #: how often the log was made shorter; each time its bytes count from 0 again
    cuts: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class _SentLogs(msgspec.Struct, frozen=True):
    """What one machine sends."""

    #: the host and the folder of these logs
    place: str
    logs: dict[str, _LogPart]


class _CopiedLog(msgspec.Struct, frozen=True):
    """How much of a log node 0 has."""

    end: int = 0
    cuts: int = 0


class LogsExchange:
    """One machine's part in a job; launchers keep their numbers over its starts."""

    def __init__(
        self, store: Counters, launcher: int, host: str, log_dir: Path, *, sends: bool
    ) -> None:
        """`sends`: no other launcher sends the logs of this folder."""
        self._store, self._launcher, self._sends = store, launcher, sends
        self._place, self._folder = f"{host}:{log_dir}", log_dir
        #: by log: its size at the last look, and how often it was made shorter
        self._sizes: dict[str, tuple[int, int]] = {}
        self._most = _MAX_BYTES
        self._is_sent = False
        #: by launcher: the number of its last message, and what node 0 has of its logs
        self._seen: dict[int, int] = {}
        self._copied: dict[int, dict[str, _CopiedLog]] = {}
        #: by log: the launcher whose lines its copy has last
        self._writers: dict[str, int] = {}
        self._has_warned = False

    def bring(self, launchers: Collection[int], *, receives: bool, is_last: bool = False) -> None:
        """Send what is new, or on node 0 (`receives`) take it from these launchers.

        `is_last`: the ends of logs count more than their middles.
        """
        if receives:
            for launcher in launchers:
                if launcher != self._launcher:
                    self._receive(launcher)
        elif self._sends:
            self._send(0 if is_last else _BEHIND_BYTES)

    # -- a machine that sends

    def _send(self, behind: int) -> None:
        logs = dict(self._parts(behind))
        if not logs and not self._is_sent:
            return
        # once node 0 has everything, the store keeps nothing of it
        message = msgspec.json.encode(_SentLogs(self._place, logs)).decode() if logs else ""
        began = time.monotonic()
        self._store.set(f"logs/{self._launcher}", message)
        is_slow = time.monotonic() - began > _SLOW_S
        wanted = self._most // 2 if is_slow else 2 * self._most
        self._most = min(max(wanted, _MIN_BYTES), _MAX_BYTES)
        self._store.add(f"logs_sent/{self._launcher}", 1)
        self._is_sent = bool(logs)

    def _parts(self, behind: int) -> Iterator[tuple[str, _LogPart]]:
        """What node 0 lacks, of as many logs as share a message."""
        copied, lacking = self._confirmed(), []
        for name, size in self._look():
            last, cuts = self._sizes.get(name, (0, 0))
            cuts += size < last
            self._sizes[name] = size, cuts
            has = copied.get(name)
            if has is None or size > has.end or cuts > has.cuts:
                start = has.end if has is not None and has.cuts == cuts else 0
                lacking.append((name, start, size, cuts))
        # those that lack most come first
        lacking.sort(key=lambda one: one[1] - one[2])
        del lacking[_MAX_LOGS:]
        for name, start, size, cuts in lacking:
            most = self._most // len(lacking)
            begin = size - most if size - start > max(behind, most) else start
            data = _read(self._folder / name, begin, most)
            if data is not None:
                yield name, _LogPart(begin, data, cuts)

    def _confirmed(self) -> Mapping[str, _CopiedLog]:
        key = f"logs_copied/{self._launcher}"
        if not self._store.check([key]):
            return {}
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(self._store.get(key), type=dict[str, _CopiedLog])
        return {}

    def _look(self) -> Iterator[tuple[str, int]]:
        """The logs of this machine, with their sizes; copies of other machines are not sent."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for one in entries:
                if _NAME.fullmatch(one.name) and one.name not in self._writers:
                    with contextlib.suppress(OSError):
                        if one.is_file(follow_symlinks=False):
                            yield one.name, one.stat(follow_symlinks=False).st_size

    # -- node 0

    def _receive(self, launcher: int) -> None:
        number = self._store.add(f"logs_sent/{launcher}", 0)
        if number == self._seen.get(launcher, 0):
            return
        self._seen[launcher] = number
        data = self._store.get(f"logs/{launcher}")
        if not data:
            return
        try:
            message = msgspec.json.decode(data, type=_SentLogs)
        except msgspec.MsgspecError as error:
            self._warn(f"logs of launcher {launcher} cannot be read: {error}")
            return
        copied = self._copied.setdefault(launcher, {})
        for name, part in message.logs.items():
            # a name from another machine must not lead out of the folder
            if _NAME.fullmatch(name) and self._copy(launcher, message.place, name, part):
                copied[name] = _CopiedLog(part.end, part.cuts)
        self._store.set(f"logs_copied/{launcher}", msgspec.json.encode(copied).decode())

    def _copy(self, launcher: int, place: str, name: str, part: _LogPart) -> bool:
        """Append what the copy lacks; False if it has the part, or cannot be written."""
        place, has = f"{place}/{name}", self._copied[launcher].get(name)
        notes = []
        if self._writers.get(name) != launcher:
            notes.append(f"--- copied from {place} ---")
        if has is not None and part.cuts > has.cuts:
            notes.append(f"--- {place} was made shorter ---")
        end = has.end if has is not None and has.cuts == part.cuts else 0
        if part.start > end:
            notes.append(f"--- {part.start - end:,} bytes are only in {place} ---")
        is_new = has is None or part.cuts > has.cuts or part.end > end
        if not is_new or not self._append(name, notes, part.data[max(0, end - part.start) :]):
            return False
        self._writers[name] = launcher
        return True

    def _append(self, name: str, notes: list[str], data: bytes) -> bool:
        """Append all or nothing; notes have lines of their own."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(self._folder / name, flags, 0o644), "r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                is_in_line = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
                lines = "".join(f"{note}\n" for note in notes)
                text = (b"\n" if notes and is_in_line else b"") + lines.encode() + data
                try:
                    done = file.write(text)
                    if done != len(text):
                        raise OSError(f"{done} of {len(text)} bytes were written")
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            self._warn(f"logs of other machines are not copied to {self._folder / name}: {error}")
            return False
        return True

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", text)


def _read(path: Path, start: int, most: int) -> bytes | None:
    """Bytes of a log; None if it has vanished."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError), open(os.open(path, flags), "rb") as file:
        file.seek(start)
        return file.read(most)
    return None
