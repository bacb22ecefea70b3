# SPDX-License-Identifier: Apache-2.0
"""The log folder: one file a process, separate from those of other runs."""

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

#: the file that names the job of these logs
ENDPOINTS = "endpoints.log"
_OURS = re.compile(
    r"(workerlog|serverlog)\.\d+|endpoints\.log|dashboard\.(log|token)|launcher\..+\.json|metrics"
)
_CHUNK = 1 << 20


class LogFolder:
    """The log folder of one run, locked for its duration."""

    def __init__(
        self,
        path: pathlib.Path,
        *,
        moved_to: pathlib.Path | None = None,
        lock: FileLock | None = None,
        is_shared: bool = False,
    ) -> None:
        self.path = path
        #: the folder that has the logs of an earlier run now
        self.moved_to = moved_to
        #: True when another launcher of the same job has locked this folder
        self.is_shared = is_shared
        self._lock = lock

    def open(self, member: JobProcess, restart: int) -> int:
        """Open the log of one process for appending; return its descriptor."""
        descriptor = os.open(self.file(member), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if restart:
            os.write(descriptor, b"--- restart %d ---\n" % restart)
        return descriptor

    def file(self, member: JobProcess) -> pathlib.Path:
        """The path of one process's log."""
        return self.path / member.log_name

    def write_endpoints(self, job_id: str, layout: JobLayout) -> None:
        """Write the endpoints of all processes of the job."""
        rows = [f"job {job_id}"]
        for rank, node in enumerate(layout.nodes):
            rows.append(f"node {rank} {node.host}")
        for kind, endpoints in (("server", layout.servers), ("worker", layout.workers)):
            rows += [f"{kind} {n} {host}:{port}" for n, (host, port) in enumerate(endpoints)]
        # atomic, since another launcher of the job may be reading
        data = ("\n".join(rows) + "\n").encode()
        replace_file(self.path / ENDPOINTS, data, unique=True, durable=False)

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.release()


def claim(log_dir: str, job_id: str) -> LogFolder:
    """Claim `log_dir` for this run, or `log_dir`-2, ... if another run uses it.

    The launchers of one job may share the folder, over NFS or on one machine. Node 0 claims it
    first and writes the job's id; a launcher that finds this id moves no logs.
    """
    for number in range(1, 1000):
        path = pathlib.Path(log_dir if number == 1 else f"{log_dir}-{number}").absolute()
        _make(path)
        if _is_of_job(path, job_id):
            return LogFolder(path, is_shared=True)
        lock = _lock(path)
        if lock is not None:
            return LogFolder(path, moved_to=_move_old(path), lock=lock)
    raise LaunchError(
        f"the log folders {log_dir} to {log_dir}-999 are all in use; pass another --log_dir"
    )


def _make(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(
            f"cannot write logs to {path}: {error.strerror}; make it writable or pass --log_dir"
        ) from None


def _is_of_job(path: pathlib.Path, job_id: str) -> bool:
    with contextlib.suppress(OSError):
        return (path / ENDPOINTS).read_text().startswith(f"job {job_id}\n")
    return False


def _lock(path: pathlib.Path) -> FileLock | None:
    """Lock the folder; None while another run has the lock."""
    lock = FileLock(path / ".lock", 0o644)
    # on a file system without locks, the job runs without one
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
    raise LaunchError(f"{wanted.parent} has 999 folders {wanted.name}-N of old logs; remove some")


class FileFollower:
    """Shows what processes append to a file."""

    def __init__(self, path: pathlib.Path, show: Callable[[bytes], None]) -> None:
        self._file = path.open("rb", buffering=0)
        self._file.seek(0, os.SEEK_END)
        self._show = show

    def pump(self) -> None:
        """Show what was appended since the last call."""
        while data := self._file.read(_CHUNK):
            self._show(data)

    def close(self) -> None:
        """Show the rest and close the file."""
        self.pump()
        self._file.close()


def relative(path: pathlib.Path) -> str:
    """A path, relative if it is in the current folder."""
    return os.path.relpath(path) if path.is_relative_to(pathlib.Path.cwd()) else str(path)


def tail(path: pathlib.Path, limit: int = 1 << 16) -> bytes:
    """The last `limit` bytes of a log, none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read()
    except OSError:
        return b""
