# SPDX-License-Identifier: Apache-2.0
"""A terminal for the commands of pages: one shell in a folder, as a reader has it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
#: has a sitecustomize, which Python imports at its start
_STARTUP = Path(__file__).parent / "startup"
#: what a shell prints after each command
_END = re.compile(r"<end (\d+)>\n")
#: set where tests run; a reader has none of them
_OURS = ("OMP_NUM_THREADS", "FORCE_COLOR", "PYTHONWARNINGS", "PYTHONUNBUFFERED")


@dataclasses.dataclass(frozen=True)
class Printed:
    """A command, with what it has printed."""

    command: str
    text: str
    code: int


def environment() -> dict[str, str]:
    """The variables of a terminal in which this Python and its commands are found."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{_STARTUP}:{ROOT / 'src'}",
    }


class Terminal:
    """A shell that runs one command after another, with both output streams in one pipe."""

    def __init__(self, folder: Path, variables: dict[str, str], limit_s: float = 240.0) -> None:
        read, self._commands = os.pipe()
        #: not from stdin, which commands would read
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", f"/dev/fd/{read}"],
            cwd=folder,
            env=variables,
            pass_fds=[read],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(read)
        self._limit_s = limit_s
        self._waiting = ""

    def run(self, command: str) -> Printed:
        """Type a command, and return what the terminal shows until the next prompt."""
        os.write(self._commands, f'{command}\necho "<end $?>"\n'.encode())
        match, text = self._until(_END)
        return Printed(command, text, int(match[1]))

    def wait_for(self, text: str) -> str:
        """Read what a background job prints until `text` and the end of that line."""
        match, shown = self._until(re.compile(re.escape(text) + r".*\n"))
        return shown + match[0]

    def _until(self, pattern: re.Pattern[str]) -> tuple[re.Match[str], str]:
        end = time.monotonic() + self._limit_s
        while not (match := pattern.search(self._waiting)):
            self._waiting += self._more(end - time.monotonic(), pattern.pattern)
        shown, self._waiting = self._waiting[: match.start()], self._waiting[match.end() :]
        return match, shown

    def _more(self, seconds: float, wanted: str) -> str:
        assert self._shell.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._shell.stdout, selectors.EVENT_READ)
            ready = selector.select(max(0.0, seconds))
        more = os.read(self._shell.stdout.fileno(), 1 << 16) if ready else b""
        if not more:
            raise TimeoutError(
                f"the terminal did not show {wanted!r} within {self._limit_s:.0f} s, but:\n"
                f"{self._waiting[-2000:]}"
            )
        return more.decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._commands)
        if kind is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait(timeout=self._limit_s)
        if self._shell.stdout is not None:
            self._shell.stdout.close()
