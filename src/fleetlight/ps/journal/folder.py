# SPDX-License-Identifier: Apache-2.0
"""`Folder`: what one server keeps on disk, and that only one process has it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetlight.errors import JournalError, PlanError
from fleetlight.ps.journal.place import claim, refuse_if_in_use, release, replace
from fleetlight.ps.journal.room import once_there_is_room, written
from fleetlight.ps.journal.segment import segments, sync_folder
from fleetlight.ps.journal.synced import unmark
from fleetlight.ps.messages import TableFile
from fleetlight.ps.plan import Plan, first_difference

FORMAT = 5
_IDENTITY, _ROWS, _MANIFEST = "identity.json", "rows-", "manifest.json"


#: what comes of reading bytes that are no document
_NONSENSE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Identity(msgspec.Struct, frozen=True):
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
    #: it begins with a checkpoint, of which not all is in it yet: nobody was told anything
    loading: bool = False
    format: int = FORMAT


class _Rows(msgspec.Struct, frozen=True):
    """What a snapshot consists of."""

    files: list[TableFile]


class Folder:
    """A folder of journal files and snapshots, locked as long as this process has it."""

    def __init__(
        self, path: Path, identity: Identity, lock: int, *, is_new: bool, patience_s: float
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
        wanted: Identity,
        *,
        resume: bool = False,
        must_exist: bool = False,
        patience_s: float = 0.0,
    ) -> Folder:
        """The folder of this server, new or with what an earlier life has left.

        What another launch has left is taken up where that is asked for by `resume`; `must_exist`:
        and there must be something. `patience_s`: how long a full disk is waited for.
        """
        lock = once_there_is_room(path, lambda: claim(path), patience_s)
        try:
            before = _read(path)
            if before is None:
                _refuse_nobodys(path)
            _refuse_another_number(path, wanted)
            if before is not None and before.over:
                # who was to remove it has died over that
                _clear(path, before)
                before = None
            if must_exist and before is None:
                raise JournalError(
                    f"durability: {path} has nothing to go on from; begin anew without --resume "
                    "(FLEET_RESUME), or look whether the job is started where the one before was"
                )
            if before is not None and (before.loading or _begins_anew(before, wanted, resume)):
                _clear(path, before)
                before = None
            identity = wanted if before is None else _next_life(before, wanted, path, resume)
            _identify(path, identity, patience_s)
            return cls(path, identity, lock, is_new=before is None, patience_s=patience_s)
        except BaseException:
            release(lock)
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
        release(self._lock)

    def end(self) -> None:
        """Nothing of it is needed any more, and nobody goes on from it."""
        _end(self.path, self.identity)

    def clear(self) -> None:
        """The same, and remove it."""
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
        replace(folder / _MANIFEST, msgspec.json.encode(_Rows(files)))
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
            return msgspec.json.decode(data, type=_Rows).files
        except (FileNotFoundError, *_NONSENSE):
            return None


def _identify(path: Path, identity: Identity, patience_s: float) -> None:
    file, data = path / _IDENTITY, msgspec.json.encode(identity)
    written(file, lambda: replace(file, data), patience_s)


def _read(path: Path) -> Identity | None:
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
        return msgspec.convert(found, Identity)
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


def _refuse_another_number(path: Path, wanted: Identity) -> None:
    """What a job with more servers, or fewer, has left would be neither taken up nor replaced."""
    for other in sorted(path.parent.glob(f"server-*/{_IDENTITY}")):
        found = _read(other.parent)
        if found is not None and not found.over and found.server_num != wanted.server_num:
            if other.parent != path:
                refuse_if_in_use(other.parent)
            raise JournalError(
                f"durability: {other.parent} has what an earlier job with {found.server_num} "
                f"server(s) has left, which did not end well; this one has {wanted.server_num}: go "
                "on with as many as before, or remove it, or name another folder in "
                "strategy.durability_configs.folder"
            )


def _is_same(before: Identity, wanted: Identity) -> bool:
    """One start of one job: only this server was started again."""
    return bool(wanted.job) and (before.job, before.start) == (wanted.job, wanted.start)


def _begins_anew(before: Identity, wanted: Identity, resume: bool) -> bool:
    """The workers of the same job were started again, too, and begin at their first step."""
    is_another_start = before.job == wanted.job and not _is_same(before, wanted)
    return is_another_start and bool(wanted.job) and not resume


def _end(path: Path, identity: Identity) -> None:
    over = msgspec.structs.replace(identity, over=True)
    with contextlib.suppress(OSError):
        # a full disk gets room by what goes then
        replace(path / _IDENTITY, msgspec.json.encode(over))


def _clear(path: Path, identity: Identity) -> None:
    # a process may die over this, and half of it is nothing to go on from
    _end(path, identity)
    unmark(path)
    for _, file in segments(path):
        file.unlink()
    for folder in path.glob(f"{_ROWS}*"):
        shutil.rmtree(folder)
    # whose it is goes last, also for the disk
    sync_folder(path)
    (path / _IDENTITY).unlink()


def _next_life(before: Identity, wanted: Identity, path: Path, resume: bool) -> Identity:
    if not resume and (before.job != wanted.job or not wanted.job):
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
    inherited = before.inherited or not _is_same(before, wanted)
    return msgspec.structs.replace(wanted, life=before.life + 1, inherited=inherited, loading=False)
