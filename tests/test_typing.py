# SPDX-License-Identifier: Apache-2.0
"""mypy in user scripts: it knows each name and setting, and refuses typos."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.strategy import written_dicts

import fleetlight
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.settings import Settings, default_of

ROOT = Path(__file__).parents[1]
USER = ROOT / "tests" / "typed" / "user.py"

_ERROR = re.compile(r"^(.+):(\d+): error: .*\[([\w-]+)\]$", re.MULTILINE)
_EXPECTED = re.compile(r"  # ([a-z]+(?:-[a-z]+)*)$")


# mypy reads the types of torch again without a cache
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_flags_the_errors_of_a_script_and_nothing_else(tmp_path: Path) -> None:
    every = tmp_path / "every_setting.py"
    every.write_text("\n".join(["import fleetlight as fleet", *every_setting()]) + "\n")
    # the project's options, so that mypy's cache of torch is shared
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(USER), str(every)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    flagged = [
        (Path(file).name, int(line), code) for file, line, code in _ERROR.findall(done.stdout)
    ]
    expected = [
        (USER.name, number, found[1])
        for number, line in enumerate(USER.read_text().splitlines(), 1)
        if (found := _EXPECTED.search(line))
    ]
    assert sorted(flagged) == expected, done.stdout + done.stderr


def every_setting() -> Iterator[str]:
    """Each setting and alias as a keyword, as an attribute, and in a dict."""
    strategy = DistributedStrategy()
    yield "strategy = fleet.DistributedStrategy()"
    for field in dataclasses.fields(DistributedStrategy):
        yield from uses(field.name, default_of(field))
    for alias in DistributedStrategy.ALIASES:
        yield from uses(alias, strategy[alias])


def uses(name: str, value: Any) -> Iterator[str]:
    """Lines that set and read a setting."""
    if isinstance(value, Settings):
        yield from (f"strategy.{name}.{key} = {inner!r}" for key, inner in value.items())
        value = dict(value.items())
    yield f"fleet.DistributedStrategy({name}={value!r})"
    yield f"strategy.{name} = {value!r}"
    yield f"print(strategy.{name})"


def test_dicts_of_nested_configs_follow_their_fields() -> None:
    text = written_dicts.FILE.read_text(encoding="utf-8")
    assert text == written_dicts.written(), "run: python -m tests.strategy.written_dicts"


def test_package_is_marked_as_typed() -> None:
    assert Path(fleetlight.__file__).with_name("py.typed").is_file()
