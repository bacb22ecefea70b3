# SPDX-License-Identifier: Apache-2.0
"""The log folder: one file for each process, never mixed with an earlier or another run."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import time
from collections.abc import Callable

from fleetlight.errors import LaunchError
from fleetlight.files.atomic import replace_file
from fleetlight.files.lock import FileLock
from fleetlight.launch.job.layout import JobLayout, JobProcess

#: the file that says whose logs these are
ENDPOINTS = "endpoints.log"
_OURS = re.compile(r"(workerlog|serverlog)\.\d+|endpoints\.log")
_CHUNK = 1 << 20


class LogFolder:
    """The folder of one run, held by a lock while the run lives."""

    def __init__(
        self,
        path: pathlib.Path,
        *,
        moved_to: pathlib.Path | None = None,
        lock: FileLock | None = None,
        is_shared: bool = False,
    ) -> None:
        self.path = path
        #: where the logs of an earlier run went
        self.moved_to = moved_to
        #: True when another launcher of the same job looks after this folder
        self.is_shared = is_shared
        self._lock = lock

    def open(self, member: JobProcess, restart: int) -> int:
        """A descriptor that appends to the log of one process."""
        descriptor = os.open(self.file(member), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if restart:
            os.write(descriptor, b"--- restart %d ---\n" % restart)
        return descriptor

    def file(self, member: JobProcess) -> pathlib.Path:
        """The log of one process."""
        return self.path / member.log_name

    def write_endpoints(self, job_id: str, layout: JobLayout) -> None:
        """Where every process of the job is reached."""
        rows = [f"job {job_id}"]
        for rank, node in enumerate(layout.nodes):
            rows.append(f"node {rank} {node.host}")
        for kind, endpoints in (("server", layout.servers), ("worker", layout.workers)):
            rows += [f"{kind} {n} {host}:{port}" for n, (host, port) in enumerate(endpoints)]
        # another launcher of the job may be reading
        data = ("\n".join(rows) + "\n").encode()
        replace_file(self.path / ENDPOINTS, data, unique=True, durable=False)

    def close(self) -> None:
        """Let another run have the folder."""
        if self._lock is not None:
            self._lock.release()


def claim(log_dir: str, job_id: str) -> LogFolder:
    """The folder for this run: `log_dir`, or `log_dir`-2, ... while another run writes there.

    The launchers of one job may share the folder, over NFS or on one machine. Node 0 comes first
    and leaves the job's id; who finds that id moves nothing away.
    """
    for number in range(1, 1000):
        path = pathlib.Path(log_dir if number == 1 else f"{log_dir}-{number}").absolute()
        _make(path)
        if _is_of_job(path, job_id):
            return LogFolder(path, is_shared=True)
        lock = _lock(path)
        if lock is not None:
            return LogFolder(path, moved_to=_move_old(path), lock=lock)
    raise LaunchError(f"every log folder from {log_dir} to {log_dir}-999 is in use; say --log_dir")


def _make(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(
            f"cannot write logs to {path}: {error.strerror}; make it writable or say --log_dir"
        ) from None


def _is_of_job(path: pathlib.Path, job_id: str) -> bool:
    with contextlib.suppress(OSError):
        return (path / ENDPOINTS).read_text().startswith(f"job {job_id}\n")
    return False


def _lock(path: pathlib.Path) -> FileLock | None:
    """The lock of the folder; None while another run holds it."""
    lock = FileLock(path / ".lock", 0o644)
    # a file system without locks must not stop the job
    with contextlib.suppress(OSError):
        if not lock.acquire():
            lock.release()
            return None
    return lock


def _move_old(path: pathlib.Path) -> pathlib.Path | None:
    old = [entry for entry in path.iterdir() if _OURS.fullmatch(entry.name)]
    if not old:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(max(e.stat().st_mtime for e in old)))
    target = _fresh(path / "old" / stamp)
    for entry in old:
        entry.rename(target / entry.name)
    return target


def _fresh(wanted: pathlib.Path) -> pathlib.Path:
    for number in range(1, 1000):
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            target.mkdir(parents=True)
            return target
    raise LaunchError(f"too many old logs in {wanted.parent}; remove some")


class FileFollower:
    """Shows what is appended to a file."""

    def __init__(self, path: pathlib.Path, show: Callable[[bytes], None]) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(0, os.SEEK_END)
        self._show = show

    def pump(self) -> None:
        """Show what is new."""
        while data := self._file.read(_CHUNK):
            self._show(data)

    def close(self) -> None:
        """Show the rest."""
        self.pump()
        self._file.close()


def relative(path: pathlib.Path) -> str:
    """A path as a person would type it here."""
    return os.path.relpath(path) if path.is_relative_to(pathlib.Path.cwd()) else str(path)


def tail(path: pathlib.Path, limit: int = 1 << 16) -> str:
    """The last part of a log; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
