# SPDX-License-Identifier: Apache-2.0
"""Slurm without Slurm: the batch script, and how its commands are used."""

import os
import subprocess
from pathlib import Path

import pytest

from fleetlight.cli import fleetlight as tool
from fleetlight.cli.fleetrun import main
from fleetlight.errors import ConfigError
from fleetlight.launch.backends.slurm import engine
from fleetlight.launch.backends.slurm.engine import one_line, refusal
from fleetlight.launch.backends.slurm.layout import last_start
from fleetlight.launch.backends.slurm.script import counts_of, rescaled

Capture = pytest.CaptureFixture[str]

COUNTS = ("--server_num", "2", "--worker_num", "3")
TOKEN = "0123456789abcdef0123456789abcdef"

#: a command of Slurm that keeps what it gets
FAKE = """#!/bin/sh
name=$(basename "$0")
printf '%s\\n' "$*" >> "{folder}/$name.words"
case "$name $1" in
sbatch*) cat > {folder}/script; env > {folder}/environment; echo '12;cluster' ;;
"scontrol write") cat {folder}/script ;;
"scontrol --oneliner") cat {folder}/job ;;
esac
"""


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLEET_TOKEN", raising=False)
    (tmp_path / "train.py").write_text("")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "scontrol", "scancel"):
        (programs / name).write_text(FAKE.format(folder=tmp_path))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def printed(capfd: Capture, *words: str) -> str:
    assert main(["--on", "slurm", "--print", *words, "train.py", "--rate", "0.1"]) == 0
    return capfd.readouterr().out


def refused(capfd: Capture, *words: str) -> str:
    assert main(["--on", "slurm", *COUNTS, *words, "train.py"]) == 2
    return capfd.readouterr().err


def test_script_has_one_step_for_all_roles(capfd: Capture) -> None:
    sizes = ("--worker_cpus", "2", "--server_cpus", "4", "--server_memory", "2G")
    more = ("--option", "partition=a b", "--option", "exclusive=", "--env", "A=it's")
    script = printed(capfd, *COUNTS, *sizes, *more, "--max_restarts", "3", "--grace_s", "90.5")
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in (
        "#SBATCH --job-name=train",
        "#SBATCH --ntasks=5",
        # the larger of both roles
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --mem-per-cpu=512M",
        "#SBATCH --requeue",
        "#SBATCH --signal=TERM@91",
        "#SBATCH --partition='a b'",
        "#SBATCH --exclusive",
        "export FLEET_SERVER_NUM=2",
        "export FLEET_MAX_RESTARTS=3",
        "export A='it'\"'\"'s'",
    ):
        assert line in lines
    assert "gpus" not in script
    assert "member --restarts 3 -- " in script
    assert lines[-5].endswith("train.py --rate 0.1")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_workers_have_gpus_of_their_own(capfd: Capture) -> None:
    script = printed(capfd, "--gpus", "0,1")
    assert "#SBATCH --ntasks=2\n" in script
    assert "#SBATCH --gpus-per-task=1\n" in script
    assert "FLEET_SERVER_NUM=" not in script


def test_one_task_has_the_name_of_the_job(capfd: Capture) -> None:
    assert 'export FLEET_JOB="slurm-$SLURM_JOB_ID"' in printed(capfd, "--nproc_per_node", "1")
    assert "FLEET_JOB" not in printed(capfd, *COUNTS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--option", "partitoin=x"), "no such option of sbatch here; did you mean 'partition'"),
        (("--option", "ntasks=9"), "fleetrun sets it; use --server_num and --worker_num"),
        (("--option", "foo=x"), "no such option of sbatch here; none of the"),
        (("--option", "comment=a\nb"), "expected one line of text"),
        (("--option", "time=abc"), "'abc': expected minutes, HH:MM:SS or DAYS-HH:MM:SS"),
        (("--option", "partition="), "expected a value"),
        (("--option", "contiguous=1"), "expected no value"),
        (("--option", "ntasks-per-node=0"), "expected a number of at least 1"),
        (("--option", "nodes=two"), "expected a number, or MIN-MAX"),
        (("--env", "A-B=1"), "--env A-B: expected a name of letters, digits and _"),
        (("--env", f"FLEET_TOKEN={TOKEN}"), "--env FLEET_TOKEN: the engine sets this variable"),
    ],
)
def test_wrong_settings_are_refused(words: tuple[str, ...], message: str, capfd: Capture) -> None:
    assert message in refused(capfd, *words)
    assert not Path("log").exists()


def test_missing_commands_are_explained(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setenv("PATH", "")
    assert "sbatch not found: run this on a login node" in refused(capfd)


def refusing(fake: Path, said: str, then: str) -> None:
    """Let sbatch print errors and do something else."""
    (fake / "bin" / "sbatch").write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}END\n{then}\n")


def test_a_limit_of_an_account_is_passed_on(fake: Path, capfd: Capture) -> None:
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    refusing(
        fake,
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
        f"sbatch: error: Batch job submission failed: {policy}\n",
        "exit 1",
    )
    [line] = refused(capfd).splitlines()
    assert line.endswith(f"Slurm refuses sbatch --parsable: QOSMaxSubmitJobPerUserLimit; {policy}")


@pytest.mark.parametrize(
    ("said", "limit_s", "shown"),
    [
        (
            "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n",
            3.0,
            "Slurm tem",
        ),
        ("", 0.3, "see scontrol ping"),
    ],
)
def test_a_command_that_waits_for_a_full_queue_says_so(
    fake: Path,
    said: str,
    limit_s: float,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Capture,
) -> None:
    monkeypatch.setattr(engine, "_LIMIT_S", limit_s)
    refusing(fake, said, "exec sleep 60")
    assert main(["--on", "slurm", *COUNTS, "train.py"]) == 1
    assert f"sbatch did not reply within {limit_s:g} s: {shown}" in capfd.readouterr().err


@pytest.mark.parametrize("given", [True, False])
def test_token_is_only_in_the_environment(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture, given: bool
) -> None:
    monkeypatch.setenv("RANK", "3")
    if given:
        monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    assert main(["--on", "slurm", *COUNTS, "train.py"]) == 0
    assert "submitted slurm:12;" in capfd.readouterr().out
    lines = (fake / "environment").read_text().splitlines()
    [token] = [line.partition("=")[2] for line in lines if line.startswith("FLEET_TOKEN=")]
    assert len(token) >= 32
    assert (token == TOKEN) == given
    assert token not in (fake / "script").read_text() + (fake / "sbatch.words").read_text()
    # this one belongs to another job
    assert not any(line.startswith("RANK=") for line in lines)
    assert (fake / "log").is_dir()


def test_scale_submits_the_same_job_with_other_counts(fake: Path) -> None:
    assert main(["--on", "slurm", *COUNTS, "--checkpoint", "ck", "train.py"]) == 0
    (fake / "job").write_text("JobId=12 JobName=train JobState=RUNNING StdOut=/a b/train-12.out")
    before = (fake / "script").read_text()
    assert tool.main(["scale", "slurm:12", "--worker_num", "7"]) == 0
    after = (fake / "script").read_text()
    assert (counts_of(before), counts_of(after)) == ((2, 3), (2, 7))
    assert "\nexport FLEET_RESUME=auto\n" in after
    words = (fake / "sbatch.words").read_text().splitlines()
    assert words == ["--parsable", "--parsable --dependency=afterany:12"]
    assert (fake / "scancel.words").read_text() == "--signal=TERM 12\n"
    assert "update JobId=12 Requeue=0" in (fake / "scontrol.words").read_text()


def test_commands_need_a_job_that_can_do_so(fake: Path, capfd: Capture) -> None:
    (fake / "job").write_text("JobId=12 JobState=COMPLETED")
    for words, message in (
        (["ps", "slurm:-x"], "got the job '-x', expected the number that Slurm gave"),
        (["stop", "slurm:12"], "job 12 has ended: COMPLETED"),
        (["scale", "slurm:12", "--worker_num", "3"], "job 12 has ended: COMPLETED"),
    ):
        assert tool.main(words) == 1
        assert message in capfd.readouterr().err


def test_no_servers_appear_by_scaling(capfd: Capture) -> None:
    script = printed(capfd, "--nproc_per_node", "2")
    assert counts_of(rescaled(script, {"worker": 5})) == (0, 5)
    with pytest.raises(ConfigError, match="this job has no parameter servers"):
        rescaled(script, {"server": 1})
    with pytest.raises(ConfigError, match="was not started by fleetrun"):
        counts_of("#!/bin/sh\n")


def test_last_start_tells_where_processes_are_and_how_they_ended() -> None:
    output = (
        "start 0: tasks 2(x2) on n[1-2], servers 2 spread\n"
        "srun: error: n1: task 0: Killed\n"
        "start 1: tasks 3,1 on n[3-4], servers 1 pack\n"
        "srun: error: n3: tasks 0-1,3: Exited with exit code 69\n"
    )
    start = last_start(output)
    assert start is not None
    assert start.nodes == "n[3-4]"
    assert [(one.kind.value, one.node_rank) for one in start.places] == [
        ("server", 0),
        ("worker", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert start.ends == dict.fromkeys((0, 1, 3), "Exited with exit code 69")
    assert last_start("") is None


@pytest.mark.parametrize(
    "option", ["time=90", "time=1-12", "time=2:30:00", "time=unlimited", "nodes=2-4", "nice="]
)
def test_values_that_slurm_knows_are_accepted(option: str, capfd: Capture) -> None:
    assert main(["--on", "slurm", "--print", *COUNTS, "--option", option, "train.py"]) == 0
    name, _, value = option.partition("=")
    line = f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"
    assert f"\n{line}\n" in capfd.readouterr().out


def test_machine_without_a_cluster_is_named() -> None:
    why = "fetch_config: DNS SRV lookup failed; Could not establish a configuration source"
    assert refusal(("scontrol", "--oneliner"), why).startswith("scontrol finds no Slurm cluster")
    assert refusal(("sbatch", "--x"), "no").endswith("refuses sbatch --x: no")


def test_messages_of_slurm_become_one_line() -> None:
    text = (
        "sbatch: error: invalid partition specified: x\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    )
    assert one_line(text) == "invalid partition specified: x; Invalid partition name specified"
