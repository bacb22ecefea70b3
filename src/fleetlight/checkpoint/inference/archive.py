# SPDX-License-Identifier: Apache-2.0
"""Torch's archive of an exported program, kept free of pickle.

The archive of torch 2.13 is a zip file. The graph and the two tables of tensors are JSON, and the
tensors are raw bytes. Pickle is used in it for example inputs, for tensor subclasses, for script
and opaque objects, and by older layouts. We drop the example inputs when saving, and refuse an
archive with any of the others, when saving and again before torch gets to load it.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, cast

import msgspec
import torch
from torch.export import ExportedProgram

from fleetlight.checkpoint.storage.files import Writable
from fleetlight.errors import CheckpointError, CorruptCheckpointError

_TENSOR_FOLDERS = ("data/weights", "data/constants")
_RAW_TENSOR = re.compile(r"(weight|tensor)_\d+")
# Versions, byte order and an id; and the graph, which is JSON.
_INERT = {
    "archive_format",
    "archive_version",
    ".data/version",
    ".data/serialization_id",
    ".format_version",
    ".storage_alignment",
    "byteorder",
    "models/model.json",
}
_EXAMPLES = "data/sample_inputs/model.pt"


class _Payload(msgspec.Struct):
    path_name: str
    use_pickle: bool


class _PayloadTable(msgspec.Struct):
    config: dict[str, _Payload]


class _Outlet(io.RawIOBase):
    """Passes bytes to a sink and keeps the first failure for later.

    Torch's archive writer ends the whole process when a write fails under it (a full disk), so it
    stays open; `failure` is raised once it is done.
    """

    def __init__(self, sink: Writable) -> None:
        self._sink = sink
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Torch goes back to the start when all is written; there is nothing to go back for."""
        return 0

    def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
        """Take all of `data`, whatever happens."""
        if self.failure is None:
            try:
                self._sink.write(data)
            except OSError as error:
                self.failure = error
        return len(data)


def write_program(sink: Writable, program: ExportedProgram) -> None:
    """Write the archive of a program, without example inputs."""
    program.example_inputs = None
    outlet = _Outlet(sink)
    torch.export.save(program, cast("IO[bytes]", outlet))
    if outlet.failure is not None:
        raise outlet.failure


def read_program(path: Path) -> ExportedProgram:
    """Load a program. Its graph is turned into code that runs: load only what you trust."""
    refuse_pickle(path)
    return torch.export.load(path)


def refuse_pickle(path: Path) -> None:
    """Raise if loading the archive would unpickle anything."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                _refuse_member(path, archive, member)
    except (zipfile.BadZipFile, msgspec.DecodeError) as error:
        raise CorruptCheckpointError(f"{path} is not an exported program: {error}") from error


def _refuse_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    # The first folder is named after the archive.
    name = PurePosixPath(*PurePosixPath(member.filename).parts[1:])
    if str(name) in _INERT or (str(name) == _EXAMPLES and member.file_size == 0):
        return
    if str(name.parent) in _TENSOR_FOLDERS:
        if name.suffix == ".json":
            _refuse_table(path, msgspec.json.decode(archive.read(member), type=_PayloadTable))
            return
        if _RAW_TENSOR.fullmatch(name.name):
            return
    raise CheckpointError(
        f"{path} holds {str(name)!r}, which may be a pickle or compiled code; expected a graph and "
        f"plain tensors only"
    )


def _refuse_table(path: Path, table: _PayloadTable) -> None:
    for name, payload in table.config.items():
        # Torch goes by the flag for tensors, and by the file's name for objects.
        if payload.use_pickle or not _RAW_TENSOR.fullmatch(payload.path_name):
            raise CheckpointError(
                f"{path}: {name!r} is stored as a pickle, which can run any code when it is "
                f"loaded; expected plain tensors only (no tensor subclasses or script objects)"
            )
