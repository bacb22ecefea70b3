# SPDX-License-Identifier: Apache-2.0
"""The processes of a job that counts, by the files that each writes once it is at work."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

#: kind and number of a process
Name = tuple[str, int]
KINDS = {"server": 2, "worker": 2}
MEMBERS: tuple[Name, ...] = tuple((kind, n) for kind, count in KINDS.items() for n in range(count))
#: words of the commands that start a process: those of an engine, and fleetrun
_SHIMS = {b"member", b"fleetlight.launch"}


@dataclasses.dataclass(frozen=True)
class Incarnation:
    """A process at work: a server since it listens, a worker since its newest step."""

    pid: int
    #: as `time.time()`
    at: float


def at_work(folder: Path, name: Name) -> Incarnation | None:
    """The newest incarnation of a process; None until there is one."""
    path = folder / f"pid.{name[0]}.{name[1]}"
    # a worker writes the file at each step
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        return Incarnation(int(file.read()), os.stat(file.fileno()).st_mtime)
    return None


def all_at_work(folder: Path) -> bool:
    """True once every process has been at work; before that, a death restarts the whole job."""
    return all(at_work(folder, name) is not None for name in MEMBERS)


class Return:
    """Watches processes of a job that start, or start again, until the job trains."""

    def __init__(self, folder: Path, since: float, members: Collection[Name] = MEMBERS) -> None:
        """Call this before a kill; processes that are older have not started again."""
        self._folder, self._since = folder, since
        self._workers = [name for name in members if name[0] == "worker"]
        self._before = {name: at_work(folder, name) for name in members}
        self._returned: dict[Name, Incarnation] = {}
        self._began: list[float] = []
        self._continued: dict[Name, float] = {}

    def is_over(self, names: Collection[Name]) -> bool:
        """True once these are at work again, and each worker has made a step since then."""
        for name in names:
            if name not in self._returned:
                self._look_for(name)
        if len(self._returned) < len(names):
            return False
        since = max(one.at for one in self._returned.values())
        for name in self._workers:
            found = at_work(self._folder, name)
            if name not in self._continued and found is not None and found.at >= since:
                self._continued[name] = found.at
        return len(self._continued) == len(self._workers)

    @property
    def seconds(self) -> float:
        """From the first of these starts to the first step of the last worker."""
        return max(self._continued.values()) - min(self._began)

    @property
    def seconds_after_last(self) -> float:
        """From the last of these starts; an engine may start processes one after the other."""
        return max(self._continued.values()) - max(self._began)

    def _look_for(self, name: Name) -> None:
        before, found = self._before[name], at_work(self._folder, name)
        if found is not None and (before is None or found.pid != before.pid):
            self._returned[name] = found
            self._began.append(started_by_engine(found.pid, self._since))


def started_by_engine(pid: int, since: float) -> float:
    """When the shim of a process started, or the process where the shim is older."""
    shims = [one for one in _lineage(pid) if _SHIMS.intersection(_words(one))]
    return next(at for at in map(started_at, (*shims, pid)) if at >= since - 1 / _ticks_per_s())


def started_at(pid: int) -> float:
    """When a process started, as `time.time()`; the kernel counts in ticks of 10 ms."""
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot + int(_stat(pid)[19]) / _ticks_per_s()


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def _lineage(pid: int) -> Iterator[int]:
    """The ancestors of a process, the nearest first."""
    while (pid := int(_stat(pid)[1])) > 1:
        yield pid


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
