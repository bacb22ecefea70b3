# SPDX-License-Identifier: Apache-2.0
"""Builds a release and tries it as a user does: `make release-check`.

Wheel and sdist are built twice and compared, checked by twine, and installed into fresh virtual
environments of each Python. There Fleetlight is imported, trains in one process, and its import is
timed beside that of torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: the first use of a name, against torch alone, in seconds of the CPU
LIMIT = 1.1
IMPORTS = {"torch": "import torch", "fleetlight": "import fleetlight; fleetlight.init"}
TRAIN = ROOT / "examples" / "wide_deep" / "train_fleet.py"
#: tests of the sdist that run: as make quick, of these rooms
FAST = "not multiprocess and not long and not slow and not style"
ROOMS = ("checkpoint", "dashboard", "data", "kernels", "pages", "roles", "strategy", "wire")
VERSIONS = [f"3.{minor}" for minor in range(10, 15)]


class CheckFailed(Exception):
    """A part of the release is not as it must be."""


def run(*command: object, cwd: Path | None = None, **extra: str) -> str:
    """What a command printed; without the variables that would let it find the checkout."""
    hidden = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    told = {k: v for k, v in os.environ.items() if k not in hidden} | extra
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=told, capture_output=True, text=True)
    if done.returncode:
        raise CheckFailed(
            f"{' '.join(words)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}"
        )
    return done.stdout


def build(folder: Path) -> list[Path]:
    """Build the sdist, and the wheel from the checkout, into a folder."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "1700000000")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT, SOURCE_DATE_EPOCH=epoch)
    return sorted(folder.iterdir())


def built(work: Path) -> tuple[Path, Path]:
    """Build twice into dist/ and a folder; return the wheel and the sdist."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    first, second = build(ROOT / "dist"), build(work / "again")
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            raise CheckFailed(f"{one.name} differs from a second build of the same files")
        print(f"{one.name}: {one.stat().st_size / 1e6:.2f} MB, the same bytes in two builds")
    run(sys.executable, "-m", "twine", "check", "--strict", *first)
    print("twine check: passed")
    wheel, sdist = sorted(first, key=lambda path: path.suffix != ".whl")
    return wheel, sdist


def tested(sdist: Path, work: Path) -> None:
    """The tests of the unpacked sdist are found, and the fast ones of its rooms pass."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "sdist", filter="data")
    (inside,) = (work / "sdist").iterdir()
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    own = {"PYTHONPATH": str(inside / "src"), "OMP_NUM_THREADS": "1"}
    for told, command in (
        ("found", (*pytest, "--collect-only")),
        ("fast", (*pytest, "-n", "2", "-m", FAST, *(f"tests/{room}" for room in ROOMS))),
    ):
        last = run(*command, cwd=inside, **own).strip().splitlines()[-1]
        print(f"tests of the sdist, {told}: {last.strip('= ')}")


def installed(package: Path, python: str, torch: str, home: Path) -> None:
    """Install one file into an environment of this Python in a folder, and use it there."""
    run(python, "-m", "venv", home)
    inside = home / "bin" / "python"
    run(inside, "-m", "pip", "install", "--quiet", torch)
    run(inside, "-m", "pip", "install", "--quiet", package)
    said = run(inside, "-c", "import fleetlight; print(fleetlight.__file__)", cwd=home).strip()
    if not Path(said).is_relative_to(home):
        raise CheckFailed(f"{package.name}: fleetlight comes from {said}, expected from {home}")
    version = run(home / "bin" / "fleetrun", "--version", cwd=home).strip()
    trained = run(
        inside, TRAIN, "--samples", 20_000, "--test", 2_000, cwd=home, OMP_NUM_THREADS="1"
    )
    print(f"{package.name} on {python}: {version}; {trained.strip().splitlines()[-1]}")
    if package.suffix == ".whl":
        timed(inside, home)


def timed(python: Path, home: Path, rounds: int = 7) -> None:
    """Time the imports in turns; the ratio of the medians must stay below the limit."""
    spent: dict[str, list[float]] = {name: [] for name in IMPORTS}
    waited: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for turn in range(rounds + 1):
        for name, code in IMPORTS.items():
            before, begin = sum(os.times()[2:4]), time.perf_counter()
            run(python, "-c", code, cwd=home, OMP_NUM_THREADS="1")
            if turn:  # the first reads the files from the disk
                spent[name].append(sum(os.times()[2:4]) - before)
                waited[name].append(time.perf_counter() - begin)
    cpu = {name: statistics.median(values) for name, values in spent.items()}
    wall = {name: statistics.median(values) for name, values in waited.items()}
    ratio = cpu["fleetlight"] / cpu["torch"]
    print(
        f"import: torch {cpu['torch']:.2f} s of the CPU, fleetlight's first name"
        f" {cpu['fleetlight']:.2f} s: {ratio:.2f}x"
        f" (by the clock {wall['fleetlight'] / wall['torch']:.2f}x)"
    )
    if ratio > LIMIT:
        raise CheckFailed(f"the import costs {ratio:.2f}x of torch's, expected at most {LIMIT}x")


def every_python() -> list[str]:
    """The interpreters of this machine that Fleetlight supports, including those of pyenv."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for version in VERSIONS:
        names = [*map(str, sorted(home.glob(f"{version}.*/bin/python"))), f"python{version}"]
        found += [name for name in names if works(name)][:1]
    return found


def works(python: str) -> bool:
    """Whether this interpreter starts; pyenv has scripts for versions that are not chosen."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release and try it.")
    parser.add_argument("--torch", default="torch", help="the requirement to install first")
    parser.add_argument("--pythons", default=sys.executable, help="interpreters, or all")
    given = parser.parse_args()
    pythons = every_python() if given.pythons == "all" else given.pythons.split()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            wheel, sdist = built(work)
            tested(sdist, work)
            for python in pythons:
                for package in (wheel, sdist):
                    # with a CUDA build each takes 7 GB
                    with tempfile.TemporaryDirectory(dir=work) as home:
                        installed(package, python, given.torch, Path(home))
        except CheckFailed as failure:
            print(f"release-check: {failure}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
