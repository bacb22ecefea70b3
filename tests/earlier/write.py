# SPDX-License-Identifier: Apache-2.0
"""Writes the archives in this folder with another version's sources; README.md has the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.earlier.jobs import JOBS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def run(act: str, name: str, place: Path, *sources: str) -> list[float]:
    """The output of a job of jobs.py, in a separate process."""
    base_env = {key: value for key, value in os.environ.items() if not key.startswith("FLEET")}
    path = [*sources, *base_env.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.earlier.jobs", act, name, str(place)],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**base_env, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)
    numbers: list[float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def main(sources: str) -> None:
    """Writes an archive for each job: its saved files, and the numbers after the save."""
    for job in JOBS:
        name = job.__name__
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "saved"
            numbers = run("save", name, place, sources)
            (Path(folder) / "numbers.json").write_text(json.dumps(numbers))
            with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(folder, "", filter=_bare)


def _bare(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if entry.name.endswith(".lock") else entry


if __name__ == "__main__":
    main(sys.argv[1])
