# SPDX-License-Identifier: Apache-2.0
"""Runs ported programs as their documents do, in processes that all end."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: a job that takes longer has failed
LIMIT_S = 100
FOLDER = Path(__file__).parent
FLEETRUN = (sys.executable, "-m", "fleetlight.launch")


def start(cwd: Path, *command: object, **variables: object) -> subprocess.Popen[str]:
    """A command with both outputs in one pipe."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | {name: str(value) for name, value in variables.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes: subprocess.Popen[str], code: int = 0) -> list[str]:
    """The output of each process; all must end with `code`."""
    printed = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == code, output
            printed.append(output)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return printed


def run(cwd: Path, *command: object, code: int = 0, **variables: object) -> str:
    """The output of one command."""
    return ended(start(cwd, *command, **variables), code=code)[0]


def numbers(pattern: str, texts: str | Sequence[str]) -> list[float]:
    """The numbers in the output of programs, in order."""
    text = texts if isinstance(texts, str) else "\n".join(texts)
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, text
    return found


def logs(folder: Path, kind: str = "workerlog") -> list[str]:
    """The logs of a kind, by number."""
    files = sorted(folder.glob(f"{kind}.*"), key=lambda file: int(file.suffix[1:]))
    return [file.read_text() for file in files]
