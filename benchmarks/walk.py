# SPDX-License-Identifier: Apache-2.0
"""What a newcomer does first, from the pages alone: each task in at most five commands.

A task follows sections of pages as a reader does: it saves their programs, makes their changes
and types their commands, in an empty folder. Nothing of a page is repeated here.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pages.printed.blocks import SHELL, PrintedBlock, section
from pages.printed.outputs import write_file
from pages.printed.terminal import ROOT, Printed, Terminal, environment

from benchmarks import report

CLAIM = (
    "From the pages alone a newcomer installs Fleetlight, ports a script, runs 2 workers and "
    "2 servers, finds why a worker died, resumes a job and exports a model, each in at most "
    "5 commands."
)
MOST_COMMANDS = 5
#: what `pip install .` needs of a clone
CLONE = ("pyproject.toml", "README.md", "LICENSE", "src")
_AWAITED = re.compile(r"[Oo]nce it prints `(.+?)`")


@dataclasses.dataclass(frozen=True)
class Walked:
    """A task that was done: its commands with their outputs, and its folder."""

    folder: Path
    printed: Sequence[Printed]
    #: from the first command to the end of the last
    seconds: float

    @property
    def text(self) -> str:
        """All that was printed."""
        return "".join(one.text for one in self.printed)


@dataclasses.dataclass(frozen=True)
class FirstTask:
    """A task: the sections that a reader follows, and the check of the result."""

    name: str
    page: str
    headings: tuple[str, ...]
    is_done: Callable[[Walked], bool]
    #: the folder has a clone instead of nothing
    in_clone: bool = False

    def blocks(self) -> list[PrintedBlock]:
        """What the page prints in these sections."""
        text = (ROOT / self.page).read_text(encoding="utf-8")
        return [block for heading in self.headings for block in section(text, heading)]


def walk(task: FirstTask, folder: Path, *, download: bool = False) -> Walked:
    """Do a task in an empty folder."""
    if task.in_clone:
        _clone(folder)
    variables = environment()
    if task.in_clone:
        del variables["PYTHONPATH"]
        variables.update({} if download else _installed_packages())
    printed: list[Printed] = []
    before = time.monotonic()
    with Terminal(folder, variables) as terminal:
        for block in task.blocks():
            write_file(block, folder)
            if block.language in SHELL:
                for awaited in _AWAITED.findall(block.above):
                    shown = terminal.wait_for(awaited)
                    printed[-1] = dataclasses.replace(printed[-1], text=printed[-1].text + shown)
                printed += [terminal.run(command) for command in block.commands]
    return Walked(folder, printed, time.monotonic() - before)


def _clone(folder: Path) -> None:
    for name in CLONE:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)


def _installed_packages() -> dict[str, str]:
    """Variables by which pip finds all packages but Fleetlight installed."""
    # the value is that of the option's name: false turns the isolation off
    return {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_BUILD_ISOLATION": "false"}


def _installed(walked: Walked) -> bool:
    version = re.search(r"^fleetrun \d", walked.printed[-1].text, re.MULTILINE)
    return bool(version) and (walked.folder / ".venv/bin/fleetrun").exists()


def _ported(walked: Walked) -> bool:
    """Plain PyTorch learns; the ported script reaches the same losses alone and on two workers."""
    losses = [re.findall(r"epoch \d: loss (\S+)", one.text) for one in walked.printed]
    plain, alone, together = ([float(loss) for loss in of] for of in losses)
    same = all(abs(a - b) < 1e-3 for a, b in zip(alone, together, strict=True))
    return len(plain) == len(alone) == 3 and max(plain[-1], alone[-1]) < 0.1 and same


def _served(walked: Walked) -> bool:
    found = re.search(r"AUC (\S+)", walked.text)
    ended = "all 2 workers exited with code 0" in walked.text
    return (
        found is not None
        and ended
        and "2 workers, 2 servers" in walked.text
        and float(found[1]) > 0.7
    )


def _explained(walked: Walked) -> bool:
    """The first command prints the cause, the line of the script and the worker."""
    job, log = walked.printed
    cause = re.search(r"ValueError: (.+)\n", job.text)
    failed = re.search(r"failed: worker 1 of 2 exited with code 1 .*ValueError", job.text)
    return (
        cause is not None and failed is not None and job.code == 1 and cause[0].strip() in log.text
    )


def _resumed(walked: Walked) -> bool:
    """Both runs together make each epoch once, and the second begins where the first stopped."""
    stopped = re.search(r"stopped at step (\d+)", walked.text)
    resumed = re.search(r"resuming from .* saved at step (\d+)", walked.text)
    epochs = [int(number) for number in re.findall(r"^epoch (\d+):", walked.text, re.MULTILINE)]
    return (
        stopped is not None
        and resumed is not None
        and stopped[1] == resumed[1]
        and epochs == list(range(len(epochs)))
        and len(epochs) > 3
        and walked.printed[-1].code == 0
    )


def _exported(walked: Walked) -> bool:
    found = re.search(r"accuracy (\S+)", walked.printed[-1].text)
    is_there = (walked.folder / "model.safetensors").exists()
    return found is not None and is_there and float(found[1]) > 0.9


_QUICK = "docs/quickstart.md"
_PORTED = "The same script, distributed"
TASKS = (
    FirstTask("install", _QUICK, ("Install",), _installed, in_clone=True),
    FirstTask(
        "port a script",
        _QUICK,
        ("A plain script", _PORTED, "One process", "Two workers: `fleetrun`"),
        _ported,
    ),
    FirstTask("2 workers and 2 servers", _QUICK, ("Parameter servers",), _served),
    FirstTask("why a worker died", _QUICK, (_PORTED, "A worker that fails"), _explained),
    FirstTask("resume a job", _QUICK, (_PORTED, "Stopping and resuming"), _resumed),
    FirstTask("export a model", _QUICK, (_PORTED, "One process", "The checkpoint"), _exported),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Do all tasks in turn, and write the table; 1 if a task failed or needed more commands."""
    options = _parse(argv)
    rows = [_row(task, options) for task in TASKS]
    report.page("walk", CLAIM, _sections(rows, options), keep=not options.dry)
    return int(any({"missed", "not reached"} & set(row) for row in rows))


def _sections(rows: Sequence[Sequence[str]], options: argparse.Namespace) -> Iterator[str]:
    head = ("task", "commands", f"at most {MOST_COMMANDS}", "seconds", "result")
    packages = "downloads all packages" if options.download else "finds its packages installed"
    yield report.table(head, rows)
    yield (
        f"Rounds: {options.rounds}; seconds are median (min..max). The task install {packages}. "
        "The load by other programs was not measured."
    )


def _row(task: FirstTask, options: argparse.Namespace) -> tuple[str, ...]:
    walks = []
    is_done = True
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            walks.append(walk(task, Path(name), download=options.download))
            is_done = is_done and task.is_done(walks[-1])
    commands = len(walks[-1].printed)
    few = "met" if commands <= MOST_COMMANDS else "missed"
    seconds = report.Spread.of(one.seconds for one in walks)
    result = "as the page says" if is_done else "not reached"
    return task.name, str(commands), few, str(seconds), result


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--download", action="store_true", help="install all packages anew")
    parser.add_argument("--dry", action="store_true", help="print the table, keep no page")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
