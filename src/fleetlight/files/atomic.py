# SPDX-License-Identifier: Apache-2.0
"""Replaces files as a whole: readers see the old content or the new, even after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, unique: bool = False) -> Iterator[Path]:
    """Yield a temporary path for the new content, and move it over `path` at the end.

    The temporary name is fixed, so that the next writer removes what a killed one left. `unique`:
    each writer has its own name, and several may write at the same time.
    """
    if unique:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    else:
        temporary = path.with_name(f"{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def replace_file(
    path: Path, data: bytes, *, mode: int = 0o666, unique: bool = False, durable: bool = True
) -> None:
    """Replace the content of a file. `durable`: it also survives a power failure.

    The file never exists with wider permissions than `mode`.
    """
    with replacing(path, unique=unique) as temporary:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
    if durable:
        sync_folder(path.parent)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a disk that becomes full takes a part, and refuses the next write."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder_if_supported(folder: Path) -> None:
    """Make the names in a folder durable, unless its file system does so automatically.

    Some network file systems flush names automatically and refuse the call.
    """
    try:
        sync_folder(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
