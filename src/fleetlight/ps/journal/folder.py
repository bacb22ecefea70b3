# SPDX-License-Identifier: Apache-2.0
"""`Folder`: what one server keeps on disk, and that only one process has it."""

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

FORMAT = 5
_IDENTITY, _ROWS, _MANIFEST = "identity.json", "rows-", "manifest.json"


#: what comes of reading bytes that are no document
_NONSENSE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class FolderIdentity(msgspec.Struct, frozen=True):
    """Whose folder it is."""

    server: int
    server_num: int
    #: the launch that it belongs to; "" where nobody gave it a name
    job: str
    plan: Plan
    #: how often all processes of the job have been started together
    start: int = 0
    #: how often a server has been started on it
    life: int = 1
    #: what it has is of an earlier launch still: nothing in it speaks of the workers of this one
    inherited: bool = False
    #: nobody needs it any more: what is left of it is about to go
    over: bool = False
    #: and all workers have left it: its part of the job has ended well
    ended: bool = False
    #: it begins with a checkpoint, of which not all is in it yet: nobody was told anything
    loading: bool = False
    #: the launch that has it now, and which start of all processes; "" as `job` and `start` say
    launch: str = ""
    format: int = FORMAT


class _SnapshotManifest(msgspec.Struct, frozen=True):
    """What a snapshot consists of."""

    files: list[TableFile]


class Folder:
    """A folder of journal files and snapshots, locked as long as this process has it."""

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
        #: nothing has been written yet
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
        """The folder of this server, new or with what an earlier life has left.

        What another launch has left is taken up where that is asked for by `resume`; `must_exist`:
        and there must be something. A `decision` of all processes says with what else it goes on.
        `patience_s`: how long a full disk is waited for.
        """
        wanted = _of_launch(wanted, decision)
        lock = once_there_is_room(path, lambda: lock_folder(path), patience_s)
        try:
            before = _read(path)
            if before is None:
                _refuse_nobodys(path)
            _refuse_another_number(path, wanted.server_num)
            if before is not None and before.over:
                # who was to remove it has died over that
                _clear(path, before)
                before = None
            if must_exist and before is None:
                raise JournalError(
                    f"durability: {path} has nothing to go on from; begin anew without --resume "
                    "(FLEET_RESUME), or look whether the job is started where the one before was"
                )
            is_stale = before is not None and _begins_anew(before, wanted, resume, decision)
            if before is not None and (before.loading or is_stale):
                _clear(path, before)
                before = None
            inherits = decision is None or not decision.keeps_workers
            identity = (
                wanted if before is None else _next_life(before, wanted, path, resume, inherits)
            )
            _identify(path, identity, patience_s)
            return cls(path, identity, lock, is_new=before is None, patience_s=patience_s)
        except BaseException:
            lock.release()
            raise

    @property
    def is_resumed(self) -> bool:
        """It was written for other workers, who are gone."""
        return self.identity.inherited

    @property
    def is_own(self) -> bool:
        """Whether the next life may go on from what this launch has written."""
        return not (self.identity.inherited or self.identity.loading)

    def own(self) -> None:
        """What is there from now on is of this launch, and whole."""
        self.identity = msgspec.structs.replace(self.identity, inherited=False, loading=False)
        _identify(self.path, self.identity, self._patience_s)

    def close(self) -> None:
        """Let others have it."""
        self._lock.release()

    def end(self, *, ended: bool = False) -> None:
        """Nothing of it is needed any more; `ended`: because all workers have left."""
        self.identity = msgspec.structs.replace(self.identity, ended=ended)
        _end(self.path, self.identity)

    def clear(self) -> None:
        """Remove it, but for the word that it has `ended`."""
        _clear(self.path, self.identity)

    def rows_folder(self, first: int) -> Path:
        """Where the rows are, or will be, as they were before a record."""
        return self.path / f"{_ROWS}{first:020d}"

    def complete(self, first: int, files: list[TableFile]) -> None:
        """All rows as they were before that record are written, and count from now on.

        Raises where that is not so: what lies before them is still there then.
        """
        folder = self.rows_folder(first)
        for file in files:
            size = (folder / file.name).stat().st_size
            if size != file.bytes:
                raise JournalError(
                    f"{folder / file.name} has {size} bytes, {file.bytes} were written; look what "
                    "is wrong with the disk"
                )
        sync_folder(folder)
        data = msgspec.json.encode(_SnapshotManifest(files))
        replace_file(folder / _MANIFEST, data, mode=0o600)
        if self._files(first) != files:
            raise JournalError(
                f"{folder / _MANIFEST} is not read as it was written; look what is wrong with the "
                "disk"
            )

    def base(self) -> tuple[int, list[TableFile] | None]:
        """The record to begin with, and the rows as they were before it; None: as at the start."""
        firsts = [first for first, _ in segments(self.path)]
        for first in sorted(self._snapshots(), reverse=True):
            files = self._files(first)
            if files is not None and first in firsts:
                return first, files
        if firsts and firsts[0] != 1:
            raise JournalError(
                f"durability: {self.path} begins with record {firsts[0]}, and no snapshot lies "
                "before it; restore the folder, or start anew from the newest checkpoint"
            )
        return 1, None

    def log_bytes(self) -> int:
        """How much a life that begins now has to read back."""
        first, _ = self.base()
        return sum(path.stat().st_size for start, path in segments(self.path) if start >= first)

    def drop_before(self, first: int) -> None:
        """What lies before a snapshot is not needed any more."""
        for start, path in segments(self.path):
            if start < first:
                path.unlink()
        for start in list(self._snapshots()):
            if start < first:
                shutil.rmtree(self.rows_folder(start), ignore_errors=True)

    def drop_incomplete(self) -> None:
        """Snapshots that somebody died over."""
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
        except (FileNotFoundError, *_NONSENSE):
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
        if found["format"] != FORMAT:
            raise JournalError(
                f"durability: {path} was written in format {found['format']}, this version of "
                f"Fleetlight reads {FORMAT}; go on with the version that wrote it"
            )
        return msgspec.convert(found, FolderIdentity)
    except (*_NONSENSE, KeyError, TypeError) as error:
        raise JournalError(
            f"durability: {path / _IDENTITY} makes no sense ({error}); restore the file, or "
            f"remove the folder {path} to start anew"
        ) from error


def _refuse_nobodys(path: Path) -> None:
    """What is there without a word of whose it is would be taken up unasked."""
    if segments(path) or any(path.glob(f"{_ROWS}*")):
        raise JournalError(
            f"durability: {path} has a journal or rows, but no {_IDENTITY} that says whose they "
            f"are; restore {_IDENTITY}, or remove the folder to start anew"
        )


def _refuse_another_number(path: Path, server_num: int) -> None:
    """What a job with more servers, or fewer, has left would be neither taken up nor replaced."""
    for other in sorted(path.parent.glob(f"server-*/{_IDENTITY}")):
        found = _read(other.parent)
        if found is not None and not found.over and found.server_num != server_num:
            if other.parent != path:
                refuse_if_in_use(other.parent)
            raise JournalError(_another(other.parent, found.server_num, server_num, "server"))


def _another(path: Path, there: int, here: int, kind: str) -> str:
    return (
        f"durability: {path} has what an earlier job with {there} {kind}(s) has left, which did "
        f"not end well; this one has {here}: go on with as many as before, or remove it, or name "
        "another folder in strategy.durability_configs.folder"
    )


def launch_of(job: str, start: int) -> str:
    """One start of all processes by one launcher; "" where nothing tells one from another."""
    return f"{job}.{start}" if job else ""


def refuse_another_size(path: Path, server_num: int, worker_num: int) -> None:
    """Refuse what a job with another number of servers or workers has left."""
    _refuse_another_number(path, server_num)
    found = _read(path)
    if found is not None and not found.over and found.plan.worker_num != worker_num:
        raise JournalError(_another(path, found.plan.worker_num, worker_num, "worker"))


def remains(path: Path) -> Remains:
    """What of a job is in a folder that its server has not taken yet."""
    found = _read(path)
    if found is None or found.loading or found.over != found.ended:
        return Remains()
    return Remains(OVER if found.ended else KEPT, found.job, found.start)


def is_of_launch(path: Path, launch: str) -> bool:
    """True where only this server was started again."""
    found = _read(path)
    return found is not None and bool(launch) and _launch(found) == launch


def _of_launch(wanted: FolderIdentity, decision: Decision | None) -> FolderIdentity:
    """A folder belongs to the job that has begun it, whichever launch goes on with that."""
    launch = wanted.launch or launch_of(wanted.job, wanted.start)
    if decision is not None and decision.job:
        wanted = msgspec.structs.replace(wanted, job=decision.job, start=decision.start)
    return msgspec.structs.replace(wanted, launch=launch)


def _launch(identity: FolderIdentity) -> str:
    return identity.launch or launch_of(identity.job, identity.start)


def _is_same(before: FolderIdentity, wanted: FolderIdentity) -> bool:
    """One start of one job: only this server was started again."""
    return bool(_launch(wanted)) and _launch(before) == _launch(wanted)


def _begins_anew(
    before: FolderIdentity, wanted: FolderIdentity, resume: bool, decision: Decision | None
) -> bool:
    """The workers of the same job were started again, too, and begin at their first step."""
    if decision is not None:
        return (before.job, before.start) != (wanted.job, wanted.start)
    is_another_start = before.job == wanted.job and not _is_same(before, wanted)
    return is_another_start and bool(wanted.job) and not resume


def _end(path: Path, identity: FolderIdentity) -> None:
    over = msgspec.structs.replace(identity, over=True)
    with contextlib.suppress(OSError):
        # a full disk gets room by what goes then
        replace_file(path / _IDENTITY, msgspec.json.encode(over), mode=0o600)


def _clear(path: Path, identity: FolderIdentity) -> None:
    # a process may die over this, and half of it is nothing to go on from
    _end(path, identity)
    unmark(path)
    for _, file in segments(path):
        file.unlink()
    for folder in path.glob(f"{_ROWS}*"):
        shutil.rmtree(folder)
    # whose it is goes last, also for the disk
    sync_folder(path)
    if not identity.ended:
        (path / _IDENTITY).unlink()


def _next_life(
    before: FolderIdentity, wanted: FolderIdentity, path: Path, resume: bool, inherits: bool
) -> FolderIdentity:
    is_same = _is_same(before, wanted)
    if is_same:
        # whichever job has begun it
        wanted = msgspec.structs.replace(wanted, job=before.job, start=before.start)
    elif not resume and (before.job != wanted.job or not wanted.job):
        raise JournalError(
            f"durability: {path} has what an earlier job has left, which did not end well; let the "
            "servers go on with that (fleetrun --resume, or FLEET_RESUME=1), or remove it, or name "
            "another folder in strategy.durability_configs.folder"
        )
    for what in ("server", "server_num"):
        if getattr(before, what) != getattr(wanted, what):
            raise JournalError(
                f"durability: {path} belongs to {what} {getattr(before, what)}, this is {what} "
                f"{getattr(wanted, what)}"
            )
    difference = first_difference(wanted.plan, before.plan)
    if difference is not None:
        raise PlanError(
            f"durability: {path} was written by another script or with other settings: "
            f"{difference}; run the same script, or name another folder"
        )
    inherited = before.inherited or (inherits and not is_same)
    return msgspec.structs.replace(wanted, life=before.life + 1, inherited=inherited, loading=False)
