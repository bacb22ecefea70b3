# SPDX-License-Identifier: Apache-2.0
"""Copies worker 0's checkpoint to workers that cannot read it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

import fleetlight.checkpoint as checkpoint
from fleetlight.errors import CheckpointError, FleetError
from fleetlight.fleet.protocols import Peers

_OPERATION = "load_persistables"
#: bytes of a file in memory at a time
_CHUNK = 64 << 20


def copy_checkpoint(
    group: Peers, dirname: str, temporary: Path, *, tables: bool = True
) -> str | Path:
    """The path of the checkpoint: `dirname`, or a copy of worker 0's in `temporary`.

    Another machine may not share the path, or may have an older checkpoint there. Manifests tell
    them apart, since they contain the checksums of all files. Without `tables`, the files of tables
    are not copied.
    """
    digests = group.gather_bytes(_manifest_digest(dirname), _OPERATION)
    if len(set(digests)) == 1 or not digests[0]:
        # equal on all workers; where worker 0 has none, reading it raises the error
        return dirname
    lacks = digests[group.index] != digests[0]
    receiver = _FileReceiver(temporary if lacks else None)
    files: dict[str, Path | bytes] = {}
    for name in _names(group, lambda: files.update(_found(dirname, tables)), files):
        receiver.write(name, _chunks_of(group, files.get(name), receiver))
    group.together(receiver.check, _OPERATION)
    return temporary if lacks else dirname


class _FileReceiver:
    """Writes the received files. It reports a failure at the end: the others still receive."""

    def __init__(self, target: Path | None) -> None:
        self._target = target
        self.failure: OSError | None = None

    def write(self, name: str, chunks: Iterator[bytes]) -> None:
        """Write the chunks of a file; without a target, only consume them."""
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
        """CheckpointError if a read or a write has failed on this worker."""
        if self.failure is not None:
            where = f" ({self.failure.filename})" if self.failure.filename else ""
            raise CheckpointError(
                f"the checkpoint could not be copied from worker 0 to workers that do not have "
                f"it: {self.failure.strerror or self.failure}{where}; nothing was loaded"
            )


def _found(dirname: str, tables: bool) -> dict[str, Path | bytes]:
    """The files of a checkpoint by their names in the copy, verified; the manifest first."""
    saved = checkpoint.read(dirname)
    names = saved.files(tables=tables)
    manifest = {checkpoint.MANIFEST: saved.source.manifest_bytes()}
    return manifest | {saved.stored_name(name): saved.path(name) for name in names}


def _names(group: Peers, find: Callable[[], None], files: Mapping[str, Path | bytes]) -> list[str]:
    """The names of worker 0's files, on all workers."""
    group.together(find if group.index == 0 else None, _OPERATION)
    sent = group.broadcast_bytes(msgspec.json.encode([*files]), _OPERATION)
    return msgspec.json.decode(sent, type=list[str])


def _chunks_of(group: Peers, file: Path | bytes | None, receiver: _FileReceiver) -> Iterator[bytes]:
    """The chunks of worker 0's file, on all workers; an empty chunk is the end."""
    source = _read(file, receiver) if isinstance(file, Path) else _pieces(file or b"")
    while chunk := group.broadcast_bytes(next(source, b""), _OPERATION):
        yield chunk


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))


def _read(path: Path, receiver: _FileReceiver) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except OSError as error:
        receiver.failure = error


def _manifest_digest(dirname: str) -> bytes:
    """Empty where this worker cannot read the manifest."""
    try:
        return hashlib.sha256(checkpoint.source_of(dirname).manifest_bytes()).digest()
    except FleetError:
        return b""
