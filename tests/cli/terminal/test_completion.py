# SPDX-License-Identifier: Apache-2.0
"""The scripts that complete commands and flags, run by the shells themselves."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

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
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fleetlight; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return set(run("bash", "-u", "-c", code, str(script), *words))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("fleetlight", "do"), {"doctor"}),
        (("fleetlight", "logs", "--f"), {"--follow"}),
        (("/usr/bin/fleetlight", "checkpoints", "ver"), {"verify"}),
        (("fleetlight", "completion", "z"), {"zsh"}),
        (("fleetrun", "--nproc"), {"--nproc_per_node"}),
        (("fleetrun", "--tee", "-v", "--max_rest"), {"--max_restarts", "--max_restart"}),
        # the value of a flag is no script
        (("fleetrun", "--log_dir", "x", "--te"), {"--tee"}),
        # the words after a script are its own
        (("fleetrun", "train.py", "--te"), set()),
        # names of files, which the shell completes
        (("fleetrun", "tra"), set()),
        (("fleetrun", "--log_dir", "--te"), set()),
    ],
)
def test_bash_completes(words: tuple[str, ...], offered: set[str], bash: pathlib.Path) -> None:
    assert completed(bash, *words) == offered


def test_bash_completes_values_and_all_commands(bash: pathlib.Path) -> None:
    assert completed(bash, "fleetrun", "--on", "") == set(backends.names())
    assert {"ps", "logs", "stop", "doctor", "completion"} <= completed(bash, "fleetlight", "")
    flags = completed(bash, "fleetrun", "--")
    assert {"--gpus", "--server_num", "--quiet"} <= flags
    # a flag that is only refused is not offered
    assert "--xpus" not in flags


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert main(["completion", "zsh"]) == 0
    file = tmp_path / "script"
    file.write_text(capsys.readouterr().out)
    code = (
        "autoload -Uz compinit; compinit -u -D; source $0; COMP_WORDS=($@); "
        "COMP_CWORD=$(($# - 1)); _fleetlight; print -l $COMPREPLY"
    )
    # zsh itself leaves out what does not fit
    assert "doctor" in run("zsh", "-f", "-c", code, str(file), "fleetlight", "do")
    assert "slurm" in run("zsh", "-f", "-c", code, str(file), "fleetrun", "--on", "s")
    assert "--tee" not in run("zsh", "-f", "-c", code, str(file), "fleetrun", "t.py", "--te")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert main(["completion", "fish"]) == 0
    file = tmp_path / "script"
    file.write_text(capsys.readouterr().out)
    for words, offered in (("fleetlight do", "doctor"), ("fleetrun --on sl", "slurm")):
        assert offered in run("fish", "-N", "-c", f"source {file}; complete -C'{words}'")


def test_fish_offers_the_flags_of_a_command_there_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c fleet") for line in lines)
    follow = [line for line in lines if "-l follow" in line]
    for command, line in zip(("events", "logs"), sorted(follow), strict=True):
        start = f"complete -c fleetlight -n '__fish_seen_subcommand_from {command}' -s f"
        assert line.startswith(start)
    [on] = [line for line in lines if "-l on " in line]
    assert "-x -a 'hosts kubernetes processes ray slurm'" in on
