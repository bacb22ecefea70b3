# SPDX-License-Identifier: Apache-2.0
"""Runs the contract tests on versions of torch and Python, each in its own environment.

`make matrix TORCH="2.9 2.15" PYTHONS="python3.11"` creates missing environments in a folder
outside the checkout, and writes the results into docs/versions.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
DEV = [
    part
    for name in ("test", "test-extras")
    for part in ("--group", f"{ROOT / 'pyproject.toml'}:{name}")
]
#: the lines of the page between these markers are generated
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
HEAD = (
    "| torch | Python | passed | failed | skipped | seconds | date |",
    "|---|---|---|---|---|---|---|",
)
ASK = "import platform, torch; print(torch.__version__, platform.python_version())"


class Row(NamedTuple):
    """The result of one environment."""

    torch: str
    python: str
    passed: int
    failed: int
    skipped: int
    seconds: int
    date: str

    def line(self) -> str:
        return f"| {' | '.join(map(str, self))} |"


def environment(folder: Path, torch: str, python: str) -> Path:
    """The interpreter of an environment with this torch, created if missing."""
    home = folder / f"torch-{torch}-{Path(python).name}"
    inside = home / "bin" / "python"
    if not (home / ".ready").exists():
        print(f"making {home}", flush=True)
        subprocess.run([python, "-m", "venv", str(home)], check=True)
        pip = [str(inside), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)  # the first with --group
        exact = torch if torch.count(".") > 1 else f"{torch}.*"
        subprocess.run([*pip, f"torch=={exact}"], check=True)
        subprocess.run([*pip, "--editable", str(ROOT), *DEV], check=True)
        (home / ".ready").touch()
    return inside


def run(inside: Path, report: Path) -> Row:
    """Run the contract tests in one environment."""
    said = subprocess.run([inside, "-c", ASK], capture_output=True, text=True, check=True)
    torch, python = said.stdout.split()
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [inside, "-m", "pytest", "-q", "-m", "contract", "-p", "no:cacheprovider"]
    print(f"torch {torch}, Python {python}", flush=True)
    subprocess.run([*command, f"--junit-xml={report}"], cwd=ROOT, env=told, check=False)
    return row_of(report.read_text(), torch, python)


def row_of(report: str, torch: str, python: str) -> Row:
    """A row from pytest's report."""
    suite = ElementTree.fromstring(report)[0]
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    today = datetime.date.today().isoformat()
    seconds = round(float(suite.get("time", 0)))
    return Row(torch, python, passed, failed, count["skipped"], seconds, today)


def merged(page: str, rows: list[Row]) -> str:
    """The page, in which these rows replace rows of the same versions."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    kept = {tuple(re.split(r" *\| *", line)[1:3]): line for line in table.splitlines()[2:] if line}
    kept |= {row[:2]: row.line() for row in rows}
    lines = [*HEAD, *(kept[key] for key in sorted(kept, key=_order))]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def _order(versions: tuple[str, ...]) -> list[list[int]]:
    return [[int(part) for part in re.findall(r"\d+", version)[:3]] for version in versions]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the contract tests on several versions.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--torch", required=True, help="versions, separated by spaces")
    parser.add_argument("--pythons", default=sys.executable, help="interpreters, the same way")
    given = parser.parse_args()
    rows = []
    for python in given.pythons.split():
        for torch in given.torch.split():
            inside = environment(given.folder, torch, python)
            rows.append(run(inside, given.folder / "report.xml"))
            PAGE.write_text(merged(PAGE.read_text(), rows))
    return 1 if any(row.failed or not row.passed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
