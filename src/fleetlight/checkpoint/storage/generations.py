# SPDX-License-Identifier: Apache-2.0
"""Generations: each save is a new folder, which is valid once the manifest names it.

    DIR/.lock                    held during a save, and names the process
    DIR/manifest.json            names the current generation
    DIR/generation-000007/...    that generation's files

A save writes and flushes `generation-000008`, moves a new manifest over the old one, then removes
`generation-000007`. A crash before the move leaves the old checkpoint, a crash after it the new
one, and in both cases a folder that no manifest names, which the next save removes. A delta names
the generation that is its base as well, so that folder stays.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from fleetlight.checkpoint.storage import files
from fleetlight.checkpoint.storage.manifest import (
    MANIFEST,
    VERSION,
    AnyManifest,
    BaseEntry,
    BaseManifest,
    FileEntry,
    Named,
    all_files,
    decode,
    encode,
    folder_with,
    same_base,
)
from fleetlight.errors import CheckpointError, ConfigError, CorruptCheckpointError, PeerError
from fleetlight.files.atomic import sync_folder_if_supported
from fleetlight.files.lock import NO_LOCKS, FileLock
from fleetlight.store import is_url, shown

Directory = str | os.PathLike[str]

_LOCK = ".lock"
_COPIED = 4 << 20
_FOLDER = re.compile(r"generation-(\d{6,})")
_log = logging.getLogger(__name__)


class Generation:
    """The folder of a save in progress; no reader uses it before `publish`."""

    def __init__(self, root: Path, format_name: str) -> None:
        self.format = format_name
        self.number = max(_folders(root), default=0) + 1
        self.path = generation_folder(root, self.number)
        self.files: list[FileEntry] = []
        self.published = False
        os.mkdir(self.path)

    @property
    def location(self) -> str:
        """The path of the folder, for other processes."""
        return str(self.path.absolute())

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[files.Sink]:
        """A new file of this generation."""
        with files.Sink(self.path / name) as sink:
            yield sink
            self.files.append(sink.flush())

    def add(self, entry: FileEntry, path: Path) -> None:
        """Copy a file that was verified."""
        with files.Sink(self.path / entry.name) as sink, path.open("rb") as file:
            while data := file.read(_COPIED):
                sink.write(data)
            self.files.append(sink.flush())

    def placed(self, manifest: AnyManifest) -> AnyManifest:
        """The manifest of another checkpoint, as that of this generation."""
        return msgspec.structs.replace(
            manifest,
            generation=self.number,
            folder=msgspec.UNSET,
            earlier=msgspec.UNSET,
            base=msgspec.UNSET,
            name=msgspec.UNSET,
            files=self.files,
        )

    def header(self) -> dict[str, Any]:
        """The fields of a `BaseManifest`, once all files are written."""
        return header(self.format, self.number, self.files)

    def publish(self, manifest: BaseManifest) -> None:
        """Make this the current generation, durably, and remove the others."""
        root = self.path.parent
        kept = {self.number}
        if isinstance(manifest.base, BaseEntry):
            refuse_other_base(_named(root), manifest.base, root)
            kept.add(manifest.base.generation)
        sync_folder_if_supported(self.path)
        with files.replacing(root / MANIFEST) as sink:
            sink.write(encode(manifest))
            # from here on the folder stays: if the move fails, either generation may be named
            self.published = True
        _remove_leftovers(root, kept)


def header(format_name: str, number: int, entries: list[FileEntry]) -> dict[str, Any]:
    """The fields of a `BaseManifest` of this version, written now."""
    # the commands that look after checkpoints do not need torch
    import torch

    return {
        "format": format_name,
        "version": VERSION,
        "checksum": "",
        "generation": number,
        "created": datetime.now(timezone.utc),
        "fleetlight": _package_version(),
        "torch": str(torch.__version__),
        "files": entries,
    }


def _package_version() -> str:
    try:
        return importlib.metadata.version("fleetlight")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


@contextlib.contextmanager
def new_generation(dirname: Directory, format_name: str) -> Iterator[Generation]:
    """Yield a new generation in `dirname` to fill and publish; clean up after failures."""
    root = _folder(dirname)
    with _explained(root):
        _make_directory(root)
        with _locked(root):
            _prepare(root, format_name)
            generation = Generation(root, format_name)
            try:
                yield generation
            finally:
                if not generation.published:
                    shutil.rmtree(generation.path, ignore_errors=True)


def read_manifest(dirname: Directory, kind: type[AnyManifest], format_name: str) -> AnyManifest:
    """The manifest in `dirname`."""
    return decode(manifest_bytes(dirname), kind, format_name, Path(dirname) / MANIFEST)


def manifest_bytes(dirname: Directory) -> bytes:
    """The manifest in `dirname`, as it is stored."""
    path = _folder(dirname) / MANIFEST
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{dirname}: {_why_none(Path(dirname))}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def verified(dirname: Directory, manifest: AnyManifest, name: str) -> Path:
    """The path of a file of the manifest's generation, after checking its bytes."""
    path = Path(dirname) / folder_with(manifest, name) / name
    expected = entry_of(manifest, name, str(Path(dirname) / MANIFEST))
    try:
        files.verify(path, expected)
    except FileNotFoundError as error:
        raise _missing(path, dirname, manifest) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return path


def entry_of(manifest: BaseManifest, name: str, where: str) -> FileEntry:
    """The description of a file in a manifest, which is at `where`."""
    entry = all_files(manifest).get(name)
    if entry is None:
        raise CorruptCheckpointError(f"{where} names no file {name!r}")
    return entry


def refuse_other_base(current: Named | None, base: BaseEntry, where: object) -> None:
    """CheckpointError if the base of a save is not, or no longer, the one that is there."""
    if current is None or not same_base(current, base):
        raise CheckpointError(
            f"{where}: generation {base.generation}, which this save needs as its base, is not "
            "there any more: another process has saved or removed it. Let only one job save there; "
            "the next save has all rows"
        )


def _folder(dirname: Directory) -> Path:
    """The path of a folder; ConfigError for a URL."""
    if is_url(dirname):
        raise ConfigError(
            f"{shown(os.fspath(dirname))}: static programs do not go into a bucket; name a local "
            "folder, and copy it"
        )
    return Path(dirname)


def _missing(path: Path, dirname: Directory, manifest: AnyManifest) -> CheckpointError:
    now = read_manifest(dirname, type(manifest), manifest.format).generation
    if now != manifest.generation:
        return CheckpointError(
            f"{dirname}: generation {manifest.generation} was replaced by {now} while it was "
            f"being read; read the directory again"
        )
    return CorruptCheckpointError(
        f"{path} is missing, but {MANIFEST} names it; load another checkpoint"
    )


def _why_none(root: Path) -> str:
    if not root.exists():
        return "no such directory; expected the directory of a finished save"
    if not root.is_dir():
        return "is a file; expected the directory of a checkpoint"
    unfinished = " (only a save that never finished)" if any(_folders(root)) else ""
    return f"holds no {MANIFEST}{unfinished}; expected the directory of a finished save"


def _make_directory(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"{root} is a file; expected a directory to save into")
    new = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync_folder_if_supported(path.parent)


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Translate errors of the operating system into their meaning for the checkpoint."""
    try:
        yield
    except PeerError:
        # some are OSErrors as well, but concern another process
        raise
    except OSError as error:
        named = _named(root)
        number = named.generation if named else 0
        kept = f"generation {number} there is intact" if number else "there was no checkpoint there"
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(
            f"could not save into {root}: {error.strerror or error}{where}; {kept}. "
            f"Make room or choose a directory that can be written, and save again"
        ) from None


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keep other savers out."""
    with FileLock(root / _LOCK) as lock:
        try:
            is_ours = lock.acquire()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _log.warning("%s: this file system has no locks; let only one job save here", root)
            is_ours = True
        if not is_ours:
            raise CheckpointError(
                f"{root}: {lock.holder() or 'another process'} is saving into this directory "
                f"right now; wait for it, or save into another directory"
            )
        yield


def _prepare(root: Path, format_name: str) -> None:
    """Refuse a directory with other content, and remove the files of saves that crashed.

    A damaged manifest of the same format may be replaced; its files stay until then.
    """
    path = root / MANIFEST
    data = path.read_bytes() if path.exists() else b""
    if data and f'"{format_name}"'.encode() not in data:
        raise _refusal(path, data, format_name)
    if not path.exists():
        _remove_leftovers(root, set())
    elif named := _named(root):
        _remove_leftovers(root, named.generations)


def _refusal(path: Path, data: bytes, format_name: str) -> CheckpointError:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return CorruptCheckpointError(
            f"{path} is damaged ({len(data)} bytes): {error}; the files beside it may be "
            f"wanted, so nothing was saved. Remove it to save here, or choose another directory"
        )
    return CheckpointError(
        f"{path} is not the manifest of a {format_name}, so saving would destroy something else; "
        f"choose another directory"
    )


def _named(root: Path) -> Named | None:
    """The current generation, None if there is none or its manifest is damaged."""
    try:
        return msgspec.json.decode((root / MANIFEST).read_bytes(), type=Named)
    except (OSError, msgspec.DecodeError):
        return None


def prune_folder(dirname: Directory, format_name: str) -> int:
    """Remove what crashed saves left in a folder; returns how many generations went."""
    root = _folder(dirname)
    if not (root / MANIFEST).exists():
        raise CheckpointError(f"{dirname}: {_why_none(root)}")
    with _explained(root), _locked(root):
        before = len(_folders(root))
        _prepare(root, format_name)
        return before - len(_folders(root))


def generation_folder(root: Path, number: int) -> Path:
    """The folder of a generation."""
    return root / f"generation-{number:06d}"


def _folders(root: Path) -> list[int]:
    matches = (_FOLDER.fullmatch(path.name) for path in root.iterdir())
    return [int(match[1]) for match in matches if match]


def _remove_leftovers(root: Path, kept: set[int]) -> None:
    """Remove what no manifest names. A failure costs only space; the next save tries again."""
    for number in _folders(root):
        if number not in kept:
            shutil.rmtree(generation_folder(root, number), ignore_errors=True)
    for path in root.glob(f".{MANIFEST}.*.new"):
        with contextlib.suppress(OSError):
            path.unlink()
