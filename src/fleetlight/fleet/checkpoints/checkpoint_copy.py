# SPDX-License-Identifier: Apache-2.0
"""Brings worker 0's checkpoint to workers that cannot read it from where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fleetlight.checkpoint import read
from fleetlight.errors import CheckpointError, ConfigError
from fleetlight.fleet.protocols import Peers

_OPERATION = "load_persistables"
#: what is in memory of a file at any time
_CHUNK = 64 << 20
#: how the files of tables get from the servers into the checkpoint
FOLDER, WORKER0 = "folder", "worker0"


def check_via(via: str) -> None:
    """Refuse a way that there is not."""
    if via not in (FOLDER, WORKER0):
        raise ConfigError(
            f'got via={via!r}, expected via="{FOLDER}" (all processes see dirname) or '
            f'via="{WORKER0}" (only worker 0 does)'
        )


def carry_checkpoint(group: Peers, dirname: Path, temporary: Path, *, tables: bool = True) -> Path:
    """Where this worker finds the checkpoint: `dirname`, or a copy of worker 0's in `temporary`.

    The path may not be shared, or may hold something older on another machine: the manifest
    tells, since it has the checksum of every other file. Without `tables` their files stay.
    """
    digests = group.gather_bytes(_manifest_digest(dirname), _OPERATION)
    if len(set(digests)) == 1 or not digests[0]:
        # alike everywhere; or worker 0 has none, which reading will say
        return dirname
    lacks = digests[group.index] != digests[0]
    parcel = _Parcel(temporary if lacks else None)
    for name in _names(group, dirname, tables):
        parcel.take(name, _chunks_of(group, dirname / name, parcel))
    group.together(parcel.check, _OPERATION)
    return temporary if lacks else dirname


class _Parcel:
    """What is carried. A failure on one side is kept to the end: the others go on as agreed."""

    def __init__(self, target: Path | None) -> None:
        self._target = target
        self.failure: OSError | None = None

    def take(self, name: str, chunks: Iterator[bytes]) -> None:
        """Write the chunks of a file that is wanted; of another one, see them go by."""
        for number, chunk in enumerate(chunks):
            if self._target is None or self.failure is not None:
                continue
            path = self._target / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab" if number else "wb") as file:
                    file.write(chunk)
            except OSError as error:
                self.failure = error

    def check(self) -> None:
        """Raise what has failed on this worker."""
        if self.failure is not None:
            where = f" ({self.failure.filename})" if self.failure.filename else ""
            raise CheckpointError(
                f"the checkpoint could not be carried from worker 0 to workers that do not have "
                f"it: {self.failure.strerror or self.failure}{where}; nothing was loaded"
            )


def _names(group: Peers, dirname: Path, tables: bool) -> list[str]:
    """The files of worker 0's checkpoint, whose bytes it has checked."""
    names: list[str] = []

    def find() -> None:
        names.extend(str(path) for path in read(dirname).paths(tables=tables))

    group.together(find if group.index == 0 else None, _OPERATION)
    told = group.broadcast_bytes(msgspec.json.encode(names), _OPERATION)
    return msgspec.json.decode(told, type=list[str])


def _chunks_of(group: Peers, path: Path, parcel: _Parcel) -> Iterator[bytes]:
    """The chunks of worker 0's file, on everybody; an empty one ends it."""
    source = _read(path, parcel) if group.index == 0 else iter(())
    while chunk := group.broadcast_bytes(next(source, b""), _OPERATION):
        yield chunk


def _read(path: Path, parcel: _Parcel) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        parcel.failure = error


def _manifest_digest(dirname: Path) -> bytes:
    try:
        return hashlib.sha256((dirname / "manifest.json").read_bytes()).digest()
    except OSError:
        return b""
