# SPDX-License-Identifier: Apache-2.0
"""The launcher finds the script or module before it starts processes."""

import pathlib
import sys

import pytest

from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.launch.job.script import check_script


def test_script_must_be_a_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        check_script(LaunchOptions(script=str(tmp_path / "none.py")))
    with pytest.raises(ConfigError, match="is a folder"):
        check_script(LaunchOptions(script=str(tmp_path)))


@pytest.fixture
def _packages(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that must not be imported, in two folders of Python's path."""
    here, there = tmp_path / "here", tmp_path / "there"
    for name in (
        "here/alone.py",
        "here/outer/__init__.py",
        "here/outer/inner/__init__.py",
        "here/outer/inner/train.py",
        "here/outer/inner/__main__.py",
        "here/spread/one.py",
        "there/spread/two.py",
        "there/alone/other.py",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise AssertionError('imported')")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(there))


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize(
    "name",
    ["alone", "outer.inner", "outer.inner.train", "spread.one", "spread.two", "json.tool", "this"],
)
def test_module_is_found_without_an_import(name: str) -> None:
    check_script(LaunchOptions(script=name, module=True))
    assert "outer" not in sys.modules


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", r"module 'nope' does not exist \(looked in .*here and on"),
        ("nope.mod", "module 'nope.mod' does not exist"),
        ("outer.nope", "does not exist"),
        ("outer.inner.train.more", "does not exist"),
        (".inner", "does not exist"),
        ("alone.py", "omit -m to run a file"),
        ("outer", "is a package without __main__.py"),
        ("spread", "is a package without __main__.py"),
    ],
)
def test_module_that_cannot_be_run_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_script(LaunchOptions(script=name, module=True))
