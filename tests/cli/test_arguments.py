# SPDX-License-Identifier: Apache-2.0
"""Flags are parsed into LaunchOptions."""

import pytest

from fleetlight.cli.arguments import known_flags, parse
from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import LaunchOptions


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
