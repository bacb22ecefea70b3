# SPDX-License-Identifier: Apache-2.0
"""The scripts that complete commands and flags, run by the shells themselves."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.launch import backends


@pytest.fixture
def bash(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> pathlib.Path:
    """The script for bash in a file."""
    assert main(["completion", "bash"]) == 0
    file = tmp_path / "completion.bash"
    file.write_text(capsys.readouterr().out)
    return file


def run(*command: str) -> list[str]:
    """The words that a shell prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


def completed(script: pathlib.Path, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    code = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); "_shtab_$1"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return set(run("bash", "-u", "-c", code, str(script), *words))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("fleetlight", "do"), {"doctor"}),
        (("fleetlight", "logs", "--f"), {"--follow"}),
        (("fleetlight", "checkpoints", "ver"), {"verify"}),
        (("fleetlight", "completion", "z"), {"zsh"}),
        (("fleetrun", "--nproc"), {"--nproc_per_node"}),
        (("fleetrun", "--tee", "-v", "--max_rest"), {"--max_restarts", "--max_restart"}),
        # the value of a flag is no script
        (("fleetrun", "--log_dir", "x", "--te"), {"--tee"}),
        # names of files
        (("fleetrun", "tra"), {"train.py"}),
        (("fleetrun", "--log_dir", "tra"), {"train.py"}),
    ],
)
def test_bash_completes(
    words: tuple[str, ...],
    offered: set[str],
    bash: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert completed(bash, *words) == offered


def test_bash_completes_values_and_all_commands(bash: pathlib.Path) -> None:
    assert completed(bash, "fleetrun", "--on", "") == set(backends.names())
    assert {"ps", "logs", "stop", "doctor", "completion"} <= completed(bash, "fleetlight", "")
    flags = completed(bash, "fleetrun", "--")
    assert {"--gpus", "--server_num", "--quiet"} <= flags
    # a flag that is only refused is not offered
    assert "--xpus" not in flags


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_knows_both_programs(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    assert main(["completion", "zsh"]) == 0
    file = tmp_path / "script"
    file.write_text(capsys.readouterr().out)
    code = 'autoload -Uz compinit; compinit -u -D; eval "$(cat $0)"; print $_comps[$1] $_comps[$2]'
    programs = ("fleetlight", "fleetrun")
    assert run("zsh", "-f", "-c", code, str(file), *programs) == [f"_shtab_{p}" for p in programs]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert main(["completion", "fish"]) == 0
    file = tmp_path / "script"
    file.write_text(capsys.readouterr().out)
    for words, offered in (("fleetlight do", "doctor"), ("fleetrun --on sl", "slurm")):
        assert offered in run("fish", "-N", "-c", f"source {file}; complete -C'{words}'")


def test_without_shtab_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'fleetlight[completion]'" in capsys.readouterr().err
