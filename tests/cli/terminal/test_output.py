# SPDX-License-Identifier: Apache-2.0
"""Tables and tones of the commands."""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.cli.terminal import output
from fleetlight.cli.terminal.following import follow
from fleetlight.cli.terminal.screen import StandardOutput
from fleetlight.errors import ConfigError
from fleetlight.launch import backends
from fleetlight.launch.backends import MemberState
from fleetlight.observe.console import Tone


@pytest.mark.parametrize(
    ("state", "tone"),
    [
        ("running", Tone.PLAIN),
        ("RUNNING", Tone.PLAIN),
        ("Active", Tone.PLAIN),
        ("ended with code 0", Tone.GOOD),
        ("COMPLETED", Tone.GOOD),
        ("Succeeded", Tone.GOOD),
        ("ended with code 1", Tone.BAD),
        ("killed by SIGKILL", Tone.BAD),
        ("lost", Tone.BAD),
        ("FAILED", Tone.BAD),
        ("NODE_FAIL", Tone.BAD),
        ("ImagePullBackOff", Tone.BAD),
        ("OUT_OF_MEMORY", Tone.BAD),
        ("PENDING", Tone.WARNING),
        ("starting", Tone.WARNING),
        ("unknown", Tone.WARNING),
    ],
)
def test_state_has_a_tone(state: str, tone: Tone) -> None:
    assert output.tone_of_state(state) is tone


def test_table_in_a_pipe_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    rows = [("process", "state"), ("worker 0", "lost")]
    output.print_table(rows, [Tone.BAD])
    assert capsys.readouterr().out == "process   state\nworker 0  lost\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.print_table(rows, [Tone.BAD])
    assert "\x1b[31mworker 0  lost\x1b[0m\n" in capsys.readouterr().out


class Terminal(io.StringIO):
    """A terminal that does not know its size."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


def test_error_is_red_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    output.complain("fleetrun", ValueError("no such flag"))
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    output.complain("fleetrun", ValueError("no such flag"))
    assert terminal.getvalue() == "\x1b[31mfleetrun: error:\x1b[0m no such flag\n"
    assert pipe.getvalue() == "fleetrun: error: no such flag\n"


# -- standard output


def test_lines_of_the_launcher_start_on_a_new_line(capfd: pytest.CaptureFixture[str]) -> None:
    screen = StandardOutput()
    screen.show(b"50%")
    screen.say("failed")
    screen.say("really")
    assert capfd.readouterr().out == "50%\nfleetrun: failed\nfleetrun: really\n"


def test_a_pipe_is_no_terminal() -> None:
    assert StandardOutput().size is None


def test_a_closed_pipe_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        screen = StandardOutput()
        os.close(read)
        screen.say("not shown")
        screen.say("nor this")
        monkeypatch.undo()


# -- logs of a running job, read until its end


class Job:
    """A job whose processes print a little at each look."""

    def __init__(self, *rounds: dict[str, bytes]) -> None:
        #: what each process has printed, look by look
        self._rounds = list(rounds)
        self.now = 0

    def look(self) -> None:
        self.now += 1

    def status(self, job_id: str) -> Sequence[MemberState]:
        is_over = self.now == len(self._rounds) - 1
        names = ["launcher", *self._rounds[-1]]
        return [MemberState(name, "running", is_over=is_over) for name in names]

    def logs(self, job_id: str, member: str | None, start: int = 0) -> Iterator[bytes]:
        printed = self._rounds[self.now]
        if member not in printed:
            raise ConfigError(f"no log of {member}")
        yield printed[member][start:]

    def stop(self, job_id: str) -> None:
        raise AssertionError("not asked")

    def scale(self, job_id: str, counts: Mapping[str, int]) -> str:
        raise AssertionError("not asked")


def test_each_byte_is_shown_once_until_the_job_has_ended() -> None:
    job = Job(
        {"worker 0": b"one\ntw"},
        {"worker 0": b"one\ntwo\n", "worker 1": b"a\n"},
        {"worker 0": b"one\ntwo\nend", "worker 1": b"a\nb\n"},
    )
    assert b"".join(follow(job, "log", None, job.look)).splitlines() == [
        b"[worker 0] one",
        b"[worker 0] two",
        b"[worker 1] a",
        b"[worker 0] end",
        b"[worker 1] b",
    ]


def test_one_process_is_shown_without_a_prefix() -> None:
    job = Job({"worker 0": b"one\n"}, {"worker 0": b"one\n", "worker 1": b"a"})
    assert b"".join(follow(job, "log", "worker 1", job.look)) == b"a"
    with pytest.raises(ConfigError, match="no log of worker 7"):
        list(follow(job, "log", "worker 7", job.look))


# -- the scripts that complete commands and flags, run by the shells themselves


@pytest.fixture
def bash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
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


def completed(script: Path, *words: str) -> set[str]:
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
    bash: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert completed(bash, *words) == offered


def test_bash_completes_values_and_all_commands(bash: Path) -> None:
    assert completed(bash, "fleetrun", "--on", "") == set(backends.names())
    assert {"ps", "logs", "stop", "doctor", "completion"} <= completed(bash, "fleetlight", "")
    flags = completed(bash, "fleetrun", "--")
    assert {"--gpus", "--server_num", "--quiet"} <= flags
    # a flag that is only refused is not offered
    assert "--xpus" not in flags


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_knows_both_programs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    file = tmp_path / "script"
    file.write_text(capsys.readouterr().out)
    code = 'autoload -Uz compinit; compinit -u -D; eval "$(cat $0)"; print $_comps[$1] $_comps[$2]'
    programs = ("fleetlight", "fleetrun")
    assert run("zsh", "-f", "-c", code, str(file), *programs) == [f"_shtab_{p}" for p in programs]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
