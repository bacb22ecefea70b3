# SPDX-License-Identifier: Apache-2.0
"""Runs examples as their readers do, and parses their output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
FLEETRUN = [sys.executable, "-m", "fleetlight.launch", "--nproc_per_node", "2"]


def start(*command: object, **environment: object) -> subprocess.Popen[str]:
    """A command in the current directory, with both outputs in one pipe."""
    return subprocess.Popen(
        [str(word) for word in command],
        env=ENVIRONMENT | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """The output; the process must end with `code`."""
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def run(*command: object, **environment: object) -> str:
    return ended(start(*command, **environment))


def twins(name: str, *arguments: object) -> tuple[str, str]:
    """The output of the plain script and of ours, each as one process with equal arguments."""
    scripts = [EXAMPLES / name / f"train_{kind}.py" for kind in ("torch", "fleet")]
    plain, ours = [start(sys.executable, script, *arguments) for script in scripts]
    return ended(plain), ended(ours)


def numbers(pattern: str, output: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, output)]
    assert found, output
    return found
