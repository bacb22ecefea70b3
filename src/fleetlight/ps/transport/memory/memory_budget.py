# SPDX-License-Identifier: Apache-2.0
"""`MemoryBudget`: the memory that all connections of a server share for incoming bodies.

Each frame has a limit; all frames together must fit into the machine's memory, or the system would
kill the server during the step of another worker.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from fleetlight.errors import ProtocolError

#: smaller bodies are not counted: they arrive quickly
WORTH_BYTES = 1 << 20
_NOTHING = contextlib.nullcontext()


class MemoryBudget:
    """Reservations of several threads on free memory."""

    def __init__(self, free: Callable[[], int | None]) -> None:
        """`free` returns the free bytes, None if unknown."""
        self._free = free
        self._claimed = 0
        self._changed = threading.Condition()

    def claimed(self, size: int, patience_s: float) -> AbstractContextManager[None]:
        """Reserve memory inside the block; wait while other threads fill theirs.

        The reservation ends with the block: by then the system counts the memory as used.
        """
        return _NOTHING if size < WORTH_BYTES else self._reserved(size, patience_s)

    @contextlib.contextmanager
    def _reserved(self, size: int, patience_s: float) -> Iterator[None]:
        end = time.monotonic() + patience_s
        with self._changed:
            while (free := self._free()) is not None and self._claimed + size > free:
                # do not wait for a body that would not fit alone
                left = end - time.monotonic()
                if not self._claimed or size > free or not self._changed.wait(max(0.0, left)):
                    raise ProtocolError(_refusal(size, free, self._claimed))
            self._claimed += size
        try:
            yield
        finally:
            with self._changed:
                self._claimed -= size
                self._changed.notify_all()


def _refusal(size: int, free: int, claimed: int) -> str:
    taken = f", of which {claimed} bytes are reserved for other frames" if claimed else ""
    return (
        f"a frame has a body of {size} bytes, but only {free} bytes of memory are free "
        f"here{taken}; use more servers, smaller batches or a machine with more memory"
    )


UNLIMITED = MemoryBudget(lambda: None)


def free_memory(root: Path = Path("/")) -> int | None:
    """Free bytes of the machine or the container, whichever is less."""
    known = [free for free in (_machine_memory(root), _container_memory(root)) if free is not None]
    return min(known, default=None)


def _machine_memory(root: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return None if found is None else int(found[1]) << 10


def _container_memory(root: Path) -> int | None:
    """Free bytes of the control group; its page cache counts as free."""
    group = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    folder = root / "sys/fs/cgroup" / ("" if group is None else group[1])
    most, taken = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
    if not (most.isdigit() and taken.isdigit()):
        return None
    files = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return max(0, int(most) - int(taken) + (0 if files is None else int(files[1])))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
