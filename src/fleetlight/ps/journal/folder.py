# SPDX-License-Identifier: Apache-2.0
"""`Folder`: the log and the snapshots of one server on disk, locked by its process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetlight.errors import JournalError, PlanError
from fleetlight.files.atomic import replace_file, sync_folder
from fleetlight.files.lock import FileLock
from fleetlight.ps.journal.disk_full_retry import once_there_is_room, written
from fleetlight.ps.journal.fsync_marker import unmark
from fleetlight.ps.journal.locked_dir import lock_folder, refuse_if_in_use
from fleetlight.ps.journal.segment import segments
from fleetlight.ps.messages import TableFile
from fleetlight.ps.plan import Plan, first_difference
from fleetlight.ps.resume import KEPT, OVER, Decision, Remains

FORMAT = 1
_IDENTITY, _ROWS, _MANIFEST = "identity.json", "rows-", "manifest.json"


#: errors of decoding bytes that are not a valid document
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class FolderIdentity(msgspec.Struct, frozen=True):
    """Which server and job a folder belongs to."""

    server: int
    server_num: int
    #: the launch that began it; "" if the launch has no name
    job: str
    plan: Plan
    #: the number of gang restarts of the job
    start: int = 0
    #: the number of processes that have opened the folder
    incarnation: int = 1
    #: the content is from an earlier launch, and does not cover the workers of this one
    inherited: bool = False
    #: the content is not needed any more and is being removed
    over: bool = False
    #: all workers have left: the job of this server ended well
    ended: bool = False
    #: a checkpoint is being loaded into it, and no reply depends on it yet
    loading: bool = False
    #: the launch and gang restart that use it now; "" if the launch has no name
    launch: str = ""
    format: int = FORMAT


class _SnapshotManifest(msgspec.Struct, frozen=True):
    """The files of a complete snapshot."""

    files: list[TableFile]


class Folder:
    """A folder of log segments and snapshots, which this process has locked."""

    def __init__(
        self,
        path: Path,
        identity: FolderIdentity,
        lock: FileLock,
        *,
        is_new: bool,
        patience_s: float,
    ) -> None:
        self.path = path
        self.identity = identity
        #: the folder has no records of an earlier incarnation
        self.is_new = is_new
        self._lock, self._patience_s = lock, patience_s

    @classmethod
    def open(
        cls,
        path: Path,
        wanted: FolderIdentity,
        *,
        resume: bool = False,
        must_exist: bool = False,
        decision: Decision | None = None,
        patience_s: float = 0.0,
    ) -> Folder:
        """Lock the folder of this server, new or with the state of an earlier incarnation.

        `resume`: also use the state of another launch. `must_exist`: raise if there is no state.
        `decision`: how all processes have decided to resume. `patience_s`: how long to retry while
        the disk is full.
        """
        wanted = _launch_identity(wanted, decision)
        lock = once_there_is_room(path, lambda: lock_folder(path), patience_s)
        try:
            before = _read(path)
            if before is None:
                _refuse_unidentified(path)
            _refuse_another_number(path, wanted.server_num)
            if before is not None and before.over:
                # the process that removed it was killed before the end
                _clear(path, before)
                before = None
            if must_exist and before is None:
                raise JournalError(
                    f"durability: {path} has no state to resume from; start without --resume "
                    "(FLEET_RESUME), or check that the job runs where the last one did"
                )
            is_stale = before is not None and _starts_over(before, wanted, resume, decision)
            if before is not None and (before.loading or is_stale):
                _clear(path, before)
                before = None
            inherits = decision is None or not decision.keeps_workers
            identity = (
                wanted
                if before is None
                else _next_incarnation(before, wanted, path, resume, inherits)
            )
            _identify(path, identity, patience_s)
            return cls(path, identity, lock, is_new=before is None, patience_s=patience_s)
        except BaseException:
            lock.release()
            raise

    @property
    def is_resumed(self) -> bool:
        """True when the content was written for the workers of an earlier launch."""
        return self.identity.inherited

    @property
    def is_own(self) -> bool:
        """True when the next incarnation may resume from the records of this launch."""
        return not (self.identity.inherited or self.identity.loading)

    def own(self) -> None:
        """Mark the content as complete and as that of this launch."""
        self.identity = msgspec.structs.replace(self.identity, inherited=False, loading=False)
        _identify(self.path, self.identity, self._patience_s)

    def close(self) -> None:
        """Release the lock of the folder."""
        self._lock.release()

    def end(self, *, ended: bool = False) -> None:
        """Mark the content as not needed any more. `ended`: all workers have left."""
        self.identity = msgspec.structs.replace(self.identity, ended=ended)
        _end(self.path, self.identity)

    def clear(self) -> None:
        """Remove the content, except the mark that the job has `ended`."""
        _clear(self.path, self.identity)

    def rows_folder(self, first: int) -> Path:
        """The folder of the snapshot before a record."""
        return self.path / f"{_ROWS}{first:020d}"

    def complete(self, first: int, files: list[TableFile]) -> None:
        """Make the snapshot before a record valid, once all its files are written.

        Raises, and leaves the earlier records in place, if a file is not as it was written.
        """
        folder = self.rows_folder(first)
        for file in files:
            size = (folder / file.name).stat().st_size
            if size != file.bytes:
                raise JournalError(
                    f"{folder / file.name} has {size} bytes, {file.bytes} were written; check the "
                    "disk"
                )
        sync_folder(folder)
        data = msgspec.json.encode(_SnapshotManifest(files))
        replace_file(folder / _MANIFEST, data, mode=0o600)
        if self._files(first) != files:
            raise JournalError(
                f"{folder / _MANIFEST} was not read as it was written; check the disk"
            )

    def base(self) -> tuple[int, list[TableFile] | None]:
        """The first record to replay, and the snapshot before it; None: the state at the start."""
        firsts = [first for first, _ in segments(self.path)]
        for first in sorted(self._snapshots(), reverse=True):
            files = self._files(first)
            if files is not None and first in firsts:
                return first, files
        if firsts and firsts[0] != 1:
            raise JournalError(
                f"durability: {self.path} begins with record {firsts[0]}, and no snapshot "
                "precedes it; restore the folder, or start again from the newest checkpoint"
            )
        return 1, None

    def log_bytes(self) -> int:
        """The bytes of records that the next incarnation would replay."""
        first, _ = self.base()
        return sum(path.stat().st_size for start, path in segments(self.path) if start >= first)

    def drop_before(self, first: int) -> None:
        """Remove the records and snapshots before a snapshot."""
        for start, path in segments(self.path):
            if start < first:
                path.unlink()
        for start in list(self._snapshots()):
            if start < first:
                shutil.rmtree(self.rows_folder(start), ignore_errors=True)

    def drop_incomplete(self) -> None:
        """Remove the snapshots whose writer was killed before the end."""
        for first in list(self._snapshots()):
            if self._files(first) is None:
                shutil.rmtree(self.rows_folder(first), ignore_errors=True)

    def _snapshots(self) -> Iterator[int]:
        for path in self.path.glob(f"{_ROWS}*"):
            yield int(path.name.removeprefix(_ROWS))

    def _files(self, first: int) -> list[TableFile] | None:
        try:
            data = (self.rows_folder(first) / _MANIFEST).read_bytes()
            return msgspec.json.decode(data, type=_SnapshotManifest).files
        except (FileNotFoundError, *_UNREADABLE):
            return None


def _identify(path: Path, identity: FolderIdentity, patience_s: float) -> None:
    file, data = path / _IDENTITY, msgspec.json.encode(identity)
    written(file, lambda: replace_file(file, data, mode=0o600), patience_s)


def _read(path: Path) -> FolderIdentity | None:
    try:
        data = (path / _IDENTITY).read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = msgspec.json.decode(data)
        refuse_another_format(path, found["format"], FORMAT)
        return msgspec.convert(found, FolderIdentity)
    except (*_UNREADABLE, KeyError, TypeError) as error:
        raise JournalError(
            f"durability: {path / _IDENTITY} is damaged ({error}); restore the file, or "
            f"remove the folder {path} to start again"
        ) from error


def refuse_another_format(path: Path, there: int, here: int) -> None:
    """Refuse a folder that another version of Fleetlight wrote in a format of its own."""
    if there != here:
        raise JournalError(
            f"durability: {path} was written in format {there}, this version of Fleetlight reads "
            f"{here}; resume with the version that wrote it"
        )


def _refuse_unidentified(path: Path) -> None:
    """Refuse records without an identity: they may be those of another job."""
    if segments(path) or any(path.glob(f"{_ROWS}*")):
        raise JournalError(
            f"durability: {path} has a journal or rows, but no {_IDENTITY} that says whose they "
            f"are; restore {_IDENTITY}, or remove the folder to start again"
        )


def _refuse_another_number(path: Path, server_num: int) -> None:
    """Refuse the state of a job with another number of servers."""
    for other in sorted(path.parent.glob(f"server-*/{_IDENTITY}")):
        found = _read(other.parent)
        if found is not None and not found.over and found.server_num != server_num:
            if other.parent != path:
                refuse_if_in_use(other.parent)
            raise JournalError(_another(other.parent, found.server_num, server_num, "server"))


def _another(path: Path, there: int, here: int, kind: str) -> str:
    return (
        f"durability: {path} has what an earlier job with {there} {kind}(s) has left, which did "
        f"not end well; this one has {here}: resume with as many as before, or remove it, or name "
        "another folder in strategy.durability_configs.folder"
    )


def launch_of(job: str, start: int) -> str:
    """The name of one gang start by one launcher; "" if the job has no name."""
    return f"{job}.{start}" if job else ""


def refuse_another_size(path: Path, server_num: int, worker_num: int) -> None:
    """Refuse the state of a job with another number of servers or workers."""
    _refuse_another_number(path, server_num)
    found = _read(path)
    if found is not None and not found.over and found.plan.worker_num != worker_num:
        raise JournalError(_another(path, found.plan.worker_num, worker_num, "worker"))


def remains(path: Path) -> Remains:
    """The state in a folder that its server has not opened yet."""
    found = _read(path)
    if found is None or found.loading or found.over != found.ended:
        return Remains()
    return Remains(OVER if found.ended else KEPT, found.job, found.start)


def is_of_launch(path: Path, launch: str) -> bool:
    """True when only this server was restarted."""
    found = _read(path)
    return found is not None and bool(launch) and found.launch == launch


def _launch_identity(wanted: FolderIdentity, decision: Decision | None) -> FolderIdentity:
    """The identity with the job that began the folder, whichever launch resumes it."""
    launch = wanted.launch or launch_of(wanted.job, wanted.start)
    if decision is not None and decision.job:
        wanted = msgspec.structs.replace(wanted, job=decision.job, start=decision.start)
    return msgspec.structs.replace(wanted, launch=launch)


def _is_same(before: FolderIdentity, wanted: FolderIdentity) -> bool:
    """True for the same gang start: only this server was restarted."""
    return bool(wanted.launch) and before.launch == wanted.launch


def _starts_over(
    before: FolderIdentity, wanted: FolderIdentity, resume: bool, decision: Decision | None
) -> bool:
    """True when the workers were restarted as well, and begin at their first step."""
    if decision is not None:
        return (before.job, before.start) != (wanted.job, wanted.start)
    is_another_start = before.job == wanted.job and not _is_same(before, wanted)
    return is_another_start and bool(wanted.job) and not resume


def _end(path: Path, identity: FolderIdentity) -> None:
    over = msgspec.structs.replace(identity, over=True)
    with contextlib.suppress(OSError):
        # on a full disk the removal that follows makes room
        replace_file(path / _IDENTITY, msgspec.json.encode(over), mode=0o600)


def _clear(path: Path, identity: FolderIdentity) -> None:
    # a process may be killed here, and nothing can resume from half of the content
    _end(path, identity)
    unmark(path)
    for _, file in segments(path):
        file.unlink()
    for folder in path.glob(f"{_ROWS}*"):
        shutil.rmtree(folder)
    # the identity goes last, even on disk
    sync_folder(path)
    if not identity.ended:
        (path / _IDENTITY).unlink()


def _next_incarnation(
    before: FolderIdentity, wanted: FolderIdentity, path: Path, resume: bool, inherits: bool
) -> FolderIdentity:
    is_same = _is_same(before, wanted)
    if is_same:
        # the job that began it stays the owner
        wanted = msgspec.structs.replace(wanted, job=before.job, start=before.start)
    elif not resume and (before.job != wanted.job or not wanted.job):
        raise JournalError(
            f"durability: {path} has the state of a job that did not finish; resume that job "
            "(fleetrun --resume, or FLEET_RESUME=1), delete the folder, or name another one in "
            "strategy.durability_configs.folder"
        )
    for what in ("server", "server_num"):
        if getattr(before, what) != getattr(wanted, what):
            raise JournalError(
                f"durability: {path} has {what} = {getattr(before, what)}, and this process has "
                f"{what} = {getattr(wanted, what)}"
            )
    difference = first_difference(wanted.plan.without_places(), before.plan.without_places())
    if difference is not None:
        raise PlanError(
            f"durability: {path} was written by another script or with other settings: "
            f"{difference}; run the same script, or name another folder"
        )
    inherited = before.inherited or (inherits and not is_same)
    return msgspec.structs.replace(
        wanted, incarnation=before.incarnation + 1, inherited=inherited, loading=False
    )
