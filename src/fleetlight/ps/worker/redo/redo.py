# SPDX-License-Identifier: Apache-2.0
"""`Redo`: what of a worker outlives it, so that a later life goes on where this one stops.

Before a push leaves, it is written down, with the place in the script where it was made. A later
life sends it again under the same number, so that the servers make it once; runs the script to that
place, where the answers to calls come from what was written down, too; and goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from fleetlight.ps.calls import NONE, Call
from fleetlight.ps.journal.place import claim, release, replace
from fleetlight.ps.journal.records import Reader, Record, framed
from fleetlight.ps.journal.room import once_there_is_room, written
from fleetlight.ps.transport.protocol import Codec
from fleetlight.ps.worker.redo import shelf
from fleetlight.ps.worker.redo.answers import Answered, Answers, may_be_made_again
from fleetlight.ps.worker.redo.commits import (
    Commit,
    Commits,
    Committed,
    Moment,
    Request,
    opened,
    patiently,
)
from fleetlight.ps.worker.redo.shelf import Shelf

FORMAT = 1
_IDENTITY, _ANSWERS = "identity.json", "answers"
#: answers that nobody can ask for any more are thrown away once there are so many bytes
_COMPACT_BYTES = 4 << 20


class Identity(msgspec.Struct, frozen=True):
    """Whose folder it is."""

    worker: int
    worker_num: int
    server_num: int
    #: the launch that it belongs to, and how often all its processes were started together
    job: str
    start: int
    #: what the servers know the worker by, in all its lives
    incarnation: int
    life: int = 1
    format: int = FORMAT


class Redo:
    """The folder of one worker, which has it alone."""

    def __init__(self, path: Path, wanted: Identity, patience_s: float = 60.0) -> None:
        """`wanted` is the first life; the folder knows whether it is."""
        self._path, self._patience_s = path, patience_s
        self._lock = once_there_is_room(path, lambda: claim(path), patience_s)
        before = _read(path / _IDENTITY)
        if before is None or not _is_same(before, wanted):
            _clear(path)
            self.identity = wanted
        else:
            self.identity = msgspec.structs.replace(before, life=before.life + 1)
        file, data = path / _IDENTITY, msgspec.json.encode(self.identity)
        written(file, lambda: replace(file, data), patience_s)
        self._commits = Commits(path, patience_s)
        last = self._commits.last
        #: what is large in the moments
        self.shelf = Shelf(path, patience_s, [] if last is None else last.commit.moment.kept)
        self._codec: Codec[Answered] = Codec(Answered)
        self.answers = Answers(self._write_answer)
        for record in self._recorded():
            self.answers.remember(record.message, [array.tobytes() for array in record.arrays])
        self._file = opened(path / _ANSWERS, patience_s)
        self._size = os.fstat(self._file).st_size
        #: how large it was once it had been written anew
        self._compacted = 0
        self._is_over = False
        self._has_given_up = False
        #: one thread trains, and another may push
        self._writing = threading.Lock()

    @property
    def last(self) -> Committed | None:
        """What an earlier life was about to bring, and where it was."""
        return self._commits.last

    @property
    def has_committed(self) -> bool:
        """True once a life has made a step."""
        return self._commits.has_any

    def commit(
        self,
        moment: Moment,
        epoch: int,
        sequences: Sequence[int],
        requests: Mapping[int, Sequence[Request]],
        called: Call = NONE,
    ) -> None:
        """From now on a later life sends these, and goes on behind them, if it can."""
        if moment.why_not:
            self.give_up(moment.why_not)
            return
        self._has_given_up = False
        servers = [server for server, its in requests.items() for _ in its]
        commit = Commit(moment, epoch, list(sequences), servers, called)
        self._commits.write(commit, [one for its in requests.values() for one in its])
        self.shelf.committed(moment.number)
        with self._writing:
            if self._size > max(_COMPACT_BYTES, 2 * self._compacted):
                self._compact(moment)

    def give_up(self, why: str) -> None:
        """No later life can go on: it is told why, rather than sent to where this one was."""
        if not self._has_given_up:
            self._commits.write(Commit(Moment(0, 0, 0, b"", why_not=why), 0, [], []), [])
            self._has_given_up = True

    def close(self, *, is_needed: bool) -> None:
        """Write no more; where the job has ended well, leave nothing."""
        with self._writing:
            if self._is_over:
                return
            self._is_over = True
        self._commits.close()
        os.close(self._file)
        if not is_needed:
            _clear(self._path)
        release(self._lock)

    def _write_answer(self, one: Answered, answer: Sequence[bytes]) -> None:
        arrays = [np.frombuffer(part, np.uint8) for part in answer]
        record = b"".join(framed(self._codec, one, arrays).sealed(1))
        with self._writing:
            if not self._is_over:
                patiently(self._path / _ANSWERS, self._file, [record], self._size, self._patience_s)
                self._size += len(record)

    def _recorded(self) -> Iterable[Record[Answered]]:
        """The answers in the file; what its writer died over is cut off."""
        path, records = self._path / _ANSWERS, []
        data = np.fromfile(path, np.uint8) if path.exists() else np.empty(0, np.uint8)
        at = 0
        while found := next(iter(Reader(self._codec, data[at:], 1)), None):
            records.append(found)
            at += found.stop
        if path.exists():
            os.truncate(path, at)
        return records

    def _compact(self, moment: Moment) -> None:
        parts = [
            part
            for record in self._recorded()
            if may_be_made_again(record.message.number, moment.prelude, moment.answers)
            for part in framed(self._codec, record.message, record.arrays).sealed(1)
        ]
        beside = self._path / f"{_ANSWERS}.new"
        try:
            beside.write_bytes(b"".join(parts))
        except OSError:
            # no room: the file that is there will do
            self._compacted = self._size
            return
        beside.replace(self._path / _ANSWERS)
        os.close(self._file)
        self._file = os.open(self._path / _ANSWERS, os.O_RDWR | os.O_CLOEXEC)
        self._size = self._compacted = sum(map(len, parts))


def _is_same(before: Identity, wanted: Identity) -> bool:
    """One start of one job: only this worker was started again."""
    same = msgspec.structs.replace(wanted, incarnation=before.incarnation, life=before.life)
    return bool(wanted.job) and before == same


def _read(path: Path) -> Identity | None:
    """Another format, or nonsense, was not written by this job."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _clear(path: Path) -> None:
    for name in (_IDENTITY, _ANSWERS, f"{_ANSWERS}.new", "push.0", "push.1"):
        (path / name).unlink(missing_ok=True)
    shelf.clear(path)
