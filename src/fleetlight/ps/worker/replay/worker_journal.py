# SPDX-License-Identifier: Apache-2.0
"""`WorkerJournal`: the log from which a killed worker resumes at its last step.

Before a push is sent, the journal logs it with its position in the script. A restarted worker
repeats the push under the same number, so that the servers apply it once. It then runs the script
to that position, with logged results of calls, and continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import ComebackError, JournalError
from fleetlight.files.atomic import replace_file, replacing, sync_folder
from fleetlight.ps.journal.disk_full_retry import once_there_is_room, written
from fleetlight.ps.journal.folder import launch_of, refuse_another_format
from fleetlight.ps.journal.locked_dir import lock_folder
from fleetlight.ps.journal.records import LogRecord, RecordReader, framed
from fleetlight.ps.resume import LEFT, NOTHING, STARTED, STEPPED, UNABLE, Decision, Remains
from fleetlight.ps.transport.protocol import MessageCodec
from fleetlight.ps.worker.replay.commit_log import (
    Commit,
    CommitLog,
    Committed,
    Request,
    ResumePoint,
    opened,
    patiently,
)
from fleetlight.ps.worker.replay.replay_log import LoggedReply, ReplayLog, may_be_made_again
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.wire.control_signals import NO_SIGNAL, ControlSignal

_NAME = "kept."


class BlobStore:
    """One thread stores blobs for resume points; another may commit these points, in order.

    A restart needs only the blobs of the last two commits.
    """

    def __init__(
        self, folder: Path, patience_s: float, needed: Iterable[str] = (), *, sync: bool = False
    ) -> None:
        """`needed` are the blobs of an earlier incarnation that a restart may still read."""
        self._folder, self._patience_s, self._sync = folder, patience_s, sync
        #: by hash: the last resume point that needs it
        self._last = dict.fromkeys(needed, 0)
        self._point = 0
        self._committed = 0
        self._changing = threading.Lock()
        for path in folder.glob(f"{_NAME}*"):
            if path.name.removeprefix(_NAME) not in self._last:
                path.unlink()

    def next_point(self) -> int:
        """Start the next resume point; return its number."""
        with self._changing:
            self._point += 1
            return self._point

    def put(self, data: NDArray[np.uint8]) -> str:
        """Store a blob, unless it exists; return its name."""
        name = _digest(data.data)
        with self._changing:
            is_there = name in self._last
            self._last[name] = self._point
        if not is_there:
            self._write(name, data)
        return name

    def keep(self, name: str) -> bool:
        """Keep a blob for the current resume point; False if it is deleted."""
        with self._changing:
            is_there = name in self._last
            if is_there:
                self._last[name] = self._point
        return is_there

    def get(self, name: str) -> bytes:
        """Return a blob by its name."""
        path = self._folder / f"{_NAME}{name}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        if _digest(data) != name:
            raise ComebackError(
                f"{path}: got {len(data)} bytes that are not what this worker wrote there before "
                "its restart; start all processes again"
            )
        return data

    def committed(self, point: int) -> None:
        """Record a committed resume point; delete blobs that no restart needs."""
        with self._changing:
            dropped = [name for name, last in self._last.items() if last < self._committed]
            for name in dropped:
                del self._last[name]
                (self._folder / f"{_NAME}{name}").unlink(missing_ok=True)
            self._committed = point

    def _write(self, name: str, data: NDArray[np.uint8]) -> None:
        """Its name says that it is whole."""
        with replacing(self._folder / f"{_NAME}{name}") as temporary:
            fd = opened(temporary, self._patience_s)
            try:
                patiently(temporary, fd, [data.data], 0, self._patience_s, sync=self._sync)
            finally:
                os.close(fd)
        if self._sync:
            sync_folder(self._folder)


def clear_blobs(folder: Path) -> None:
    """Delete all blobs."""
    for path in folder.glob(f"{_NAME}*"):
        path.unlink()


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


FORMAT = 1
_IDENTITY, _REPLIES = "identity.json", "replies"
#: size at which results that no restart can ask for are removed
_COMPACT_BYTES = 4 << 20
_CODEC: MessageCodec[LoggedReply] = MessageCodec(LoggedReply)


class WorkerIdentity(msgspec.Struct, frozen=True):
    """The owner of a folder."""

    worker: int
    worker_num: int
    server_num: int
    #: the job, and the number of starts of all its processes together
    job: str
    start: int
    #: the stamp of its first start; it stays the same over restarts
    started_at: int
    incarnation: int = 1
    #: the current launch; "" if unknown
    launch: str = ""
    #: True once the worker has left the job
    ended: bool = False
    format: int = FORMAT


class WorkerJournal:
    """The folder of one worker, under an exclusive lock."""

    def __init__(
        self,
        path: Path,
        wanted: WorkerIdentity,
        patience_s: float = 60.0,
        *,
        resume: bool = False,
        sync: bool = False,
    ) -> None:
        """`wanted` is the identity of a first start; the folder may have an earlier one.

        `resume`: resume a job that was killed as a whole, if all processes agree. `sync`: fsync
        every write, so that it survives the machine.
        """
        self._path, self._patience_s, self._sync = path, patience_s, sync
        self._lock = once_there_is_room(path, lambda: lock_folder(path), patience_s)
        self._commits: CommitLog | None = None
        self._file, self._size = -1, 0
        #: size after the last compaction
        self._compacted = 0
        self._is_over = False
        self._has_given_up = False
        #: one thread trains, and another may push
        self._writing = threading.Lock()
        self.replies = ReplayLog(self._write_reply)
        #: results to write once the folder belongs to this job
        self._early: list[bytes] = []
        if not wanted.launch:
            wanted = msgspec.structs.replace(wanted, launch=launch_of(wanted.job, wanted.start))
        self._wanted = wanted
        try:
            before = _read(path / _IDENTITY)
        except JournalError:
            self._lock.release()
            raise
        is_same = before is not None and _is_same(before, wanted)
        #: True until all processes have agreed on how this worker resumes
        self.is_undecided = resume and not is_same
        self.remains = _remains(before)
        self.identity = wanted
        if before is not None and (is_same or (resume and _is_alike(before, wanted))):
            self.identity = msgspec.structs.replace(
                before, incarnation=before.incarnation + 1, launch=wanted.launch, ended=False
            )
            self._open()
        elif resume:
            self.remains = Remains()
        if is_same or (not resume and self.remains.state in (NOTHING, LEFT)):
            self.begin()

    def _open(self) -> None:
        """Read the log of an earlier incarnation."""
        self._commits = CommitLog(self._path, self._patience_s, sync=self._sync)
        last = self._commits.last
        # the blobs of the last resume point
        kept = [] if last is None else last.commit.resume_point.kept
        self.blobs = BlobStore(self._path, self._patience_s, kept, sync=self._sync)
        for record in self._recorded():
            self.replies.remember(record.message, [array.tobytes() for array in record.arrays])
        self._file = opened(self._path / _REPLIES, self._patience_s)
        self._size = os.fstat(self._file).st_size
        if last is not None and self.remains.state == STARTED:
            self.remains = msgspec.structs.replace(
                self.remains, state=UNABLE if last.commit.resume_point.why_not else STEPPED
            )

    def decide(self, decision: Decision) -> None:
        """Apply the decision of all processes: resume here, or restart the script."""
        self.is_undecided = False
        if not decision.keeps_workers or self._commits is None:
            self._forget()
        if decision.job:
            self.identity = msgspec.structs.replace(
                self.identity, job=decision.job, start=decision.start
            )
        else:
            # no job has left anything: this one begins
            self.identity = self._wanted
        if self._commits is not None:
            self._identify()

    def _forget(self) -> None:
        """Close the old log; its files stay until this worker has joined the servers."""
        if self._commits is not None:
            self._commits.close()
            os.close(self._file)
            self._commits = None
        self.replies.forget()

    def begin(self) -> None:
        """Start to log, once the worker has joined its job; delete files of other jobs."""
        if self._commits is None:
            _clear(self._path)
            self._identify()
            self._open()
            for record in self._early:
                self._put_reply(record)
            self._early.clear()
        elif not self.is_undecided:
            self._identify()

    def _identify(self) -> None:
        file, data = self._path / _IDENTITY, msgspec.json.encode(self.identity)
        written(file, lambda: replace_file(file, data, mode=0o600), self._patience_s)

    #: a restarted worker resumes at its last step
    is_stored = True

    @property
    def started_at(self) -> int:
        """As in `StepJournal`."""
        return self.identity.started_at

    @property
    def incarnation(self) -> int:
        """As in `StepJournal`."""
        return self.identity.incarnation

    @property
    def last(self) -> Committed | None:
        """The last step that an earlier incarnation logged."""
        return None if self._commits is None else self._commits.last

    @property
    def has_committed(self) -> bool:
        """True once any incarnation has logged a step."""
        return self._commits is not None and self._commits.has_any

    def commit(
        self,
        origin: StepOrigin | None,
        epoch: int,
        sequences: Sequence[int],
        requests: Mapping[int, Sequence[Request]],
        *,
        called: ControlSignal = NO_SIGNAL,
        acknowledged: Sequence[int] = (),
    ) -> None:
        """Log a step; a restarted worker repeats its requests and resumes after them."""
        if origin is None or origin.resume_point is None:
            return
        assert isinstance(origin.resume_point, ResumePoint), origin
        resume_point = msgspec.structs.replace(
            origin.resume_point, phase=origin.phase, steps=origin.steps, before=origin.before
        )
        if resume_point.why_not:
            self.give_up(resume_point.why_not)
            return
        self._has_given_up = False
        servers = [server for server, its in requests.items() for _ in its]
        commit = Commit(resume_point, epoch, list(sequences), servers, called, list(acknowledged))
        assert self._commits is not None, "a worker commits once it has joined"
        self._commits.write(commit, [one for its in requests.values() for one in its])
        self.blobs.committed(resume_point.number)
        with self._writing:
            if self._size > max(_COMPACT_BYTES, 2 * self._compacted):
                self._compact(resume_point)

    def give_up(self, why: str) -> None:
        """Log why a restarted worker cannot resume, so that it fails with this reason."""
        if not self._has_given_up:
            assert self._commits is not None, "a worker commits once it has joined"
            self._commits.write(Commit(ResumePoint(0, 0, 0, b"", why_not=why), 0, [], []), [])
            self._has_given_up = True

    def close(self, *, is_needed: bool, ended: bool = False) -> None:
        """Close the journal; delete it if not needed, except for the mark that it `ended`."""
        with self._writing:
            if self._is_over:
                return
            self._is_over = True
        if self._commits is not None:
            self._commits.close()
            os.close(self._file)
        if ended:
            self.identity = msgspec.structs.replace(self.identity, ended=True)
            # first: a worker that dies during the rest has left
            self._identify()
        if not is_needed:
            _clear(self._path, identity=not ended)
        self._lock.release()

    def _write_reply(self, one: LoggedReply, reply: Sequence[bytes]) -> None:
        arrays = [np.frombuffer(part, np.uint8) for part in reply]
        record = b"".join(framed(_CODEC, one, arrays).sealed(1))
        with self._writing:
            if self._commits is None:
                self._early.append(record)
            elif not self._is_over:
                self._put_reply(record)

    def _put_reply(self, record: bytes) -> None:
        patiently(
            self._path / _REPLIES,
            self._file,
            [record],
            self._size,
            self._patience_s,
            sync=self._sync,
        )
        self._size += len(record)

    def _recorded(self) -> Iterable[LogRecord[LoggedReply]]:
        """Read the logged results; truncate an incomplete one at the end."""
        path, records = self._path / _REPLIES, []
        data = np.fromfile(path, np.uint8) if path.exists() else np.empty(0, np.uint8)
        at = 0
        while found := next(iter(RecordReader(_CODEC, data[at:], 1)), None):
            records.append(found)
            at += found.stop
        if path.exists():
            os.truncate(path, at)
        return records

    def _compact(self, resume_point: ResumePoint) -> None:
        parts = [
            part
            for record in self._recorded()
            if may_be_made_again(record.message.number, resume_point.prelude, resume_point.replies)
            for part in framed(_CODEC, record.message, record.arrays).sealed(1)
        ]
        path = self._path / _REPLIES
        # where the disk has no room, the old file continues
        with contextlib.suppress(OSError):
            replace_file(path, b"".join(parts), mode=0o600, durable=self._sync)
        os.close(self._file)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._size = self._compacted = os.fstat(self._file).st_size


def _is_same(before: WorkerIdentity, wanted: WorkerIdentity) -> bool:
    """True when only this worker restarted, within one start of the job."""
    return bool(wanted.launch) and before.launch == wanted.launch and _is_alike(before, wanted)


def _is_alike(before: WorkerIdentity, wanted: WorkerIdentity) -> bool:
    """True for the same worker of a job of the same size."""
    facts = ("worker", "worker_num", "server_num")
    return all(getattr(before, fact) == getattr(wanted, fact) for fact in facts)


def _remains(before: WorkerIdentity | None) -> Remains:
    """The state of a folder by its identity file."""
    if before is None:
        return Remains()
    return Remains(LEFT if before.ended else STARTED, before.job, before.start)


def _read(path: Path) -> WorkerIdentity | None:
    """Read an identity; None for a missing or damaged file."""
    try:
        found = msgspec.json.decode(path.read_bytes())
        refuse_another_format(path.parent, found["format"], FORMAT)
        return msgspec.convert(found, WorkerIdentity)
    except (FileNotFoundError, msgspec.MsgspecError, KeyError, TypeError):
        return None


def _clear(path: Path, *, identity: bool = True) -> None:
    mine = [_IDENTITY] if identity else []
    for name in (*mine, _REPLIES, f"{_REPLIES}.new", "push.0", "push.1"):
        (path / name).unlink(missing_ok=True)
    clear_blobs(path)
