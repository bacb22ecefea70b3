# SPDX-License-Identifier: Apache-2.0
"""The fleetrun command: its refusals, and its import time."""

import dataclasses
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fleetlight
from fleetlight.cli import job_file
from fleetlight.cli.arguments import _by_name, known_flags, parse, parser
from fleetlight.cli.fleetrun import main
from fleetlight.cli.refused_flags import REFUSED, refusal
from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import LaunchOptions


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("print('hello')")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["none.py"], 2, "script 'none.py' does not exist"),
        (["-m", "nope.mod"], 2, "module 'nope.mod' does not exist"),
        (["--nproc_per_nodes=2", "t.py"], 2, "did you mean '--nproc_per_node'"),
        (["--gpus", "0,1", "t.py"], 2, "this machine has no GPU; use --nproc_per_node 2"),
        (
            ["--ips", "203.0.113.1,203.0.113.2", "t.py"],
            2,
            "none of 203.0.113.1, 203.0.113.2 is an address",
        ),
        (
            ["--ssl", "dir", "--server_num", "1", "--worker_num", "1", "t.py"],
            2,
            "dir is not a folder",
        ),
        (["--log_dir", "t.py/log", "t.py"], 1, "cannot write logs"),
        (["--use_paddlecloud", "t.py"], 2, "PADDLE_TRAINERS"),
    ],
)
def test_invalid_commands_are_refused(
    words: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    shown = capfd.readouterr()
    assert shown.err.startswith("fleetrun: error: ")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_taken_port_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--start_port", str(port), "t.py"]) == 1
    assert f"port {port} on 127.0.0.1 is taken" in capfd.readouterr().err


def test_a_job_runs_from_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-v", "--nnodes", "1", "t.py"]) == 0
    shown = capfd.readouterr().out
    assert "nnodes: 1:1" in shown
    assert "\nhello\n" in shown


CHEAP = """
import sys
from fleetlight.cli.fleetrun import main
try:
    main(["--help"])
except SystemExit:
    pass
loaded = {"torch", "numpy", "rich", "msgspec", "subprocess", "ctypes", "socket"} & set(sys.modules)
assert not loaded, loaded
"""


def test_help_is_cheap_and_complete() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHEAP], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for flag in ("--nproc_per_node", "--gpus", "--ips", "--server_num", "--max_restarts", "--tee"):
        assert flag in done.stdout
    assert "--xpus" not in done.stdout
    assert "on this machine; on several, list all with --servers and --workers" in done.stdout


def test_version_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capfd.readouterr().out == f"fleetrun {fleetlight.__version__}\n"


def test_one_machine_never_imports_torch() -> None:
    code = (
        "import sys; from fleetlight.cli.fleetrun import main; main(['t.py']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# -- flags are parsed into LaunchOptions


def test_a_script_alone_is_enough() -> None:
    assert parse(["train.py"]) == LaunchOptions(script="train.py")


@pytest.mark.parametrize("words", [["--nproc_per_node", "4"], ["--nproc_per_node=4"]])
def test_values_may_follow_a_space_or_an_equals_sign(words: list[str]) -> None:
    assert parse([*words, "train.py"]).nproc_per_node == 4


def test_words_after_the_script_are_its_arguments() -> None:
    found = parse(["--tee", "train.py", "--lr", "3", "--nproc_per_node", "9", "--", "x"])
    assert found.arguments == ("--lr", "3", "--nproc_per_node", "9", "--", "x")
    assert found.nproc_per_node is None


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_is_a_flag_of_the_launcher(flag: str) -> None:
    assert parse([flag, "train.py"]).verbose
    assert not parse(["train.py", flag]).verbose


@pytest.mark.parametrize(
    ("flag", "text", "name", "value"),
    [
        ("--gpus", "0,2", "gpus", (0, 2)),
        ("--selected_gpus", "1", "gpus", (1,)),
        ("--devices", "0,1", "gpus", (0, 1)),
        ("--ips", "a, b", "ips", ("a", "b")),
        ("--cluster_node_ips", "a,b", "ips", ("a", "b")),
        ("--node_ip", "10.0.0.1", "host", "10.0.0.1"),
        ("--started_port", "6170", "start_port", 6170),
        ("--trainer_num", "2", "worker_num", 2),
        ("--trainers", "a:1,b:2", "workers", ("a:1", "b:2")),
        ("--nnodes", "2", "nnodes", (2, 2)),
        ("--nnodes", "2:4", "nnodes", (2, 4)),
        ("--master", "[::1]:6170", "master", ("::1", 6170)),
        ("--node_rank", "1", "rank", 1),
        ("--deadline_s", "2.5", "deadline_s", 2.5),
    ],
)
def test_flags_have_older_spellings(flag: str, text: str, name: str, value: object) -> None:
    assert getattr(parse([flag, text, "train.py"]), name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script given"),
        (["--nproc_per_nod", "2", "t.py"], "did you mean '--nproc_per_node'"),
        (["--gpu=0", "t.py"], "unknown flag --gpu: did you mean '--gpus'"),
        (["-x", "t.py"], "unknown flag -x"),
        (["--nproc_per_node", "0", "t.py"], "got '0', expected a number of at least 1"),
        (["--nproc_per_node", "two", "t.py"], "got 'two'"),
        (["--server_num", "all", "t.py"], "got 'all', expected a number of at least 0, or auto"),
        (["--gpus", "0,0", "t.py"], "expected different GPU numbers"),
        (["--gpus", "a", "t.py"], "expected different GPU numbers"),
        (["--nnodes", "3:2", "t.py"], "expected N or MIN:MAX"),
        (["--master", "host", "t.py"], "expected host:port"),
        (["--start_port", "70000", "t.py"], "a port of 1 to 65535"),
        (["--deadline_s", "inf", "t.py"], "expected a number of seconds"),
        (["--grace_s", "-1", "t.py"], "got '-1', expected a number of seconds, at least 0"),
        (["--tee=yes", "t.py"], "--tee: takes no value, got 'yes'"),
        (["--ips", ",", "t.py"], "expected a list"),
    ],
)
def test_invalid_flags_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words)


def test_servers_are_a_number_or_auto() -> None:
    assert [parse(["--server_num", n, "t.py"]).server_num for n in ("0", "2", "auto")] == [
        *(0, 2),
        "auto",
    ]


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--xpus", "use --gpus"), ("--run_mode", "--server_num"), ("--heter_workers", "--workers")],
)
def test_flags_of_other_launchers_name_the_replacement(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([flag, "1", "t.py"])


def test_refused_flags_are_not_suggested() -> None:
    assert "--nproc_per_node" in known_flags()
    assert "--xpus" not in known_flags()


# -- known flags that fleetrun refuses


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_every_refusal_names_the_flag_and_gives_advice(flag: str) -> None:
    text = str(refusal(flag))
    assert flag in text
    assert any(word in text for word in ("use", "omit the flag", "chooses", "decide"))


# -- A job file gives the values of flags, through their checks


FULL = """
on = "slurm"
script = "t.py"
arguments = ["--lr", 0.5, "--deep", true]
name = "ads"
checkpoint = "ckpt"
resume = true
max_restarts = 2
deadline_s = 60
grace_s = 7.5
ssl = "certs"
log_dir = "logs"

[worker]
count = 4
cpus = 8
memory = "4G"
gpus = [0, 1, 2, 3]

[server]
count = 2
cpus = 1
memory = "500M"

[environment]
A = "b=c"
N = 3

[slurm]
partition = "gpu"
exclusive = ""

[kubernetes]
read_only_root = false
tolerate = ["spot", "gpu"]
node_selector = { disk = "ssd", zone = 2 }
"""

FLAGS = """
--on slurm --name ads --checkpoint ckpt --resume --max_restarts 2 --deadline_s 60 --grace_s 7.5
--ssl certs --log_dir logs --worker_num 4 --worker_cpus 8 --worker_memory 4G --gpus 0,1,2,3
--server_num 2 --server_cpus 1 --server_memory 500M --env A=b=c --env N=3
--option partition=gpu --option exclusive=
"""
SCRIPT = ["t.py", "--lr", "0.5", "--deep", "true"]


def read(text: str, *words: str) -> LaunchOptions:
    """The options by a job file with this text, and by a command line."""
    Path("job.toml").write_text(text)
    return dataclasses.replace(parse(["--job", "job.toml", *words]), job=None)


def test_a_file_equals_its_flags() -> None:
    assert read(FULL) == parse([*FLAGS.split(), *SCRIPT])


def test_an_empty_file_equals_no_flags() -> None:
    assert read("", "t.py") == parse(["t.py"])
    assert read("tee = false", "t.py") == parse(["t.py"])


@pytest.mark.parametrize(
    ("text", "words", "flags"),
    [
        ("max_restarts = 2", "--max_restarts 3", "--max_restarts 3"),
        ("[worker]\ncount = 2", "--nproc_per_node 3", "--nproc_per_node 3"),
        ("[worker]\ncount = 2", "--server_num 1", "--server_num 1 --worker_num 2"),
        ("[worker]\ncount = 2", "--server_num 1 --worker_num 5", "--server_num 1 --worker_num 5"),
        ("[worker]\ncount = 2", "", "--nproc_per_node 2"),
        ("[worker]\ncount = 0\n[server]\ncount = 'auto'", "", "--server_num auto --worker_num 0"),
        ("on = 'slurm'\n[ray]\npython = 'p'", "--on ray", "--on ray --option python=p"),
        ("[slurm]\npartition = 'a'", "", ""),
        (
            "on = 'slurm'\n[slurm]\npartition = 'a'\nqos = 'q'",
            "--option partition=b",
            "--on slurm --option partition=a --option qos=q --option partition=b",
        ),
        ("[environment]\nA = '1'", "--env A=2", "--env A=1 --env A=2"),
        ("nnodes = 2\nmaster = '[::1]:6170'", "", "--nnodes 2 --master [::1]:6170"),
        ("nnodes = '2:4'\nips = ['a', 'b']", "", "--nnodes 2:4 --ips a,b"),
    ],
)
def test_flags_override_the_file(text: str, words: str, flags: str) -> None:
    assert read(text, *words.split(), "t.py") == parse([*flags.split(), "t.py"])


@pytest.mark.parametrize(
    ("words", "script", "arguments", "module"),
    [
        ((), "pkg.train", ("a",), True),
        (("t.py",), "t.py", ("a",), False),
        (("t.py", "b", "--c"), "t.py", ("b", "--c"), False),
        (("-m", "pkg.other"), "pkg.other", ("a",), True),
    ],
)
def test_script_and_arguments_come_from_either(
    words: tuple[str, ...], script: str, arguments: tuple[str, ...], module: bool
) -> None:
    found = read("script = 'pkg.train'\nmodule = true\narguments = ['a']", *words)
    assert (found.script, found.arguments, found.module) == (script, arguments, module)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "--job job.toml: not a TOML file"),
        ("max_restart = 3", "job.toml: max_restart: no such key; did you mean 'max_restarts'"),
        ("job = 'x'", "job.toml: job: no such key"),
        ("print = true", "job.toml: print: no such key"),
        ("[workr]\ncount = 1", "job.toml: [workr]: no such section; did you mean 'worker'?"),
        ("[tee]\na = 1", "job.toml: [tee]: no such section"),
        ("[scheduler]\ncount = 1", "job.toml: [scheduler]: an engine that needs a scheduler"),
        ("[worker]\ncont = 1", "job.toml: [worker] cont: no such key; did you mean 'count'?"),
        ("[server]\ngpus = [0]", "job.toml: [server] gpus: no such key; did you mean 'cpus'"),
        ("worker = 3", "job.toml: worker: got 3 (a whole number), expected a section [worker]"),
        ("worker_num = 3", "job.toml: worker_num: a job file has this as [worker] count"),
        ("nproc_per_node = 3", "a job file has this as [worker] count"),
        ("env = 'a'", "a job file has this as a section [environment]"),
        ("[worker]\ncount = 'four'", '[worker] count: got "four" (text), expected a whole number'),
        ("[worker]\ncount = true", "got true (true or false), expected a whole number"),
        ("[worker]\ncount = 0", "job.toml: [worker] count: got 0, expected a number of at least 1"),
        ("[worker]\nmemory = '4'", "[worker] memory: got '4', expected a size like 500M or 4G"),
        (
            "[worker]\nmemory = 4",
            '[worker] memory: got 4 (a whole number), expected a size like "4G"',
        ),
        ("[worker]\ngpus = [0, 'a']", "expected a list of whole numbers like [0, 1]"),
        ("[worker]\ngpus = [0, 0]", "[worker] gpus: got '0,0', expected different GPU numbers"),
        ("[worker.cpus]\na = 1", "[worker] cpus: got a section, expected a whole number"),
        ("ips = 'a,b'", 'ips: got "a,b" (text), expected a list of texts'),
        ("tee = 1", "tee: got 1 (a whole number), expected true or false"),
        ("start_port = 70000", "start_port: got '70000', expected a port of 1 to 65535"),
        ("arguments = 'a'", 'arguments: got "a" (text), expected a list like'),
        ("[slurm]\ntime = 04:00:00", '[slurm] time: got "04:00:00" (a date or time), expected'),
        ("[slurm]\na = ['b,c']", "[slurm] a: got 'b,c' in a list; expected an entry without a"),
        ("[environment]\n'A=B' = 1", "[environment] A=B: got a name with '=' or spaces"),
    ],
)
def test_errors_name_file_section_and_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(text, "t.py")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("script = 'no.py'", (), "'no.py' does not exist .*\\(job.toml: script\\)"),
        (
            "[worker]\ncpus = 2",
            ("t.py",),
            "--worker_cpus is for an .*\\(job.toml: .worker. cpus\\)",
        ),
        ("nnodes = 2", ("t.py",), "--nnodes 2 needs --master .* \\(job.toml: nnodes\\)$"),
        (
            "on = 'slurm'\n[slurm]\npartitio = 'a'",
            ("--print", "t.py"),
            "--option partitio: no such option .* \\(job.toml: .slurm. partitio\\)$",
        ),
        (
            "on = 'slurm'\n[environment]\nFLEET_INDEX = 1",
            ("--print", "t.py"),
            "--env FLEET_INDEX: .*\\(job.toml: .environment. FLEET_INDEX\\)$",
        ),
        (
            "on = 'slurm'\n[environment]\nFLEET_INDEX = 1",
            ("--env", "FLEET_INDEX=2", "t.py"),
            r"--env FLEET_INDEX: .*\(--token_file has the token\)$",
        ),
        (
            "[worker]\ncount = 2",
            ("--server_num", "0", "t.py"),
            "needs servers: .*instead of --worker_num \\(job.toml: .worker. count\\)$",
        ),
        ("[worker]\ncpus = 2", ("--worker_cpus", "1", "t.py"), "--on NAME, or omit it$"),
        ("", (), "no script given; .*, or script = .train.py. in job.toml$"),
    ],
)
def test_errors_of_a_plan_name_the_key_too(
    text: str, words: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("job.toml").write_text(text)
    assert main(["--job", "job.toml", *words]) == 2
    error = capfd.readouterr().err
    assert re.search(message, error.rstrip()), error


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--job no.toml: cannot be read: No such file"):
        parse(["--job", "no.toml", "t.py"])


def test_each_flag_has_a_place_in_the_file() -> None:
    for name, flag in _by_name(parser()).items():
        is_free = flag.nargs == 0 or name in (*job_file._NO_KEYS, "arguments", "option", "env")
        assert is_free or flag.type in job_file._FORMS, name


def test_a_job_of_a_file_runs_and_shows_what_it_read(capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text("script = 't.py'\nverbose = true\nlog_dir = 'logs'")
    assert main(["--job", "job.toml"]) == 0
    shown = capfd.readouterr().out
    assert "\nlog_dir: logs\n" in shown
    assert "\njob: job.toml\n" in shown
    assert "places" not in shown
    assert "\nhello\n" in shown
