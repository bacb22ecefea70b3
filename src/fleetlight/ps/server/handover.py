# SPDX-License-Identifier: Apache-2.0
"""`Handover`: files of a checkpoint on their way between a server and worker 0.

It is used where the two see no common folder: worker 0 reads or writes the files piece by piece.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import CheckpointError, ProtocolError

Bytes = NDArray[np.uint8]


class Handover:
    """A temporary folder of a server, made when it is first needed."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._made: tempfile.TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path:
        """Where the files are."""
        with self._lock:
            if self._made is None:
                prefix = f"fleet-server{self._server}-"
                self._made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            return Path(self._made.name)

    def take(self, name: str, offset: int, size: int) -> Bytes:
        """A piece of a file; shorter, or empty, at its end."""
        try:
            with self._path(name).open("rb") as file:
                return np.frombuffer(os.pread(file.fileno(), size, offset), np.uint8)
        except OSError as error:
            raise self._failure(name, error) from error

    def put(self, name: str, offset: int, data: NDArray[Any]) -> None:
        """Write a piece of a file; the same piece twice does no harm."""
        path = self._path(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                view = np.ascontiguousarray(data).data.cast("B")
                while view:
                    done = os.pwrite(fd, view, offset)
                    offset, view = offset + done, view[done:]
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failure(name, error) from error

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.cleanup()

    def _path(self, name: str) -> Path:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ProtocolError(f"worker 0 asked for the file {name!r}, expected a plain name")
        return self.folder / name

    def _failure(self, name: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"server {self._server} could not hand over {name}, which is in its temporary folder: "
            f"{error.strerror or error}"
        )
