# SPDX-License-Identifier: Apache-2.0
"""Parse the flags of `fleetrun` into `LaunchOptions`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fleetlight.cli import flag_values as read
from fleetlight.cli.job_file import read_job_file
from fleetlight.cli.refused_flags import REFUSED, refusal
from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.launch import backends
from fleetlight.launch.job.options import LaunchOptions

USAGE = "fleetrun [flags] script.py [arguments of the script]"

EPILOG = """examples:
  fleetrun --nproc_per_node 4 train.py            4 workers on the CPUs of this machine
  fleetrun --gpus 0,1,2,3 train.py                4 workers, one GPU each
  fleetrun --ips 10.0.0.1,10.0.0.2 train.py       two machines; run it on both
  fleetrun --job job.toml                         the job that a file describes
"""


def parse(argv: Sequence[str]) -> LaunchOptions:
    """Parse the flags and the script in `argv`; raise ConfigError if a word is invalid.

    A flag overrides what the file of `--job` has for it.
    """
    flags = parser()
    found, unknown = flags.parse_known_args(list(argv))
    if unknown:
        raise _unknown_flag(unknown[0])
    values = vars(found)
    if not values["arguments"]:
        del values["arguments"]
    if "job" in values:
        values = read_job_file(values["job"], _by_name(flags)).overridden_by(values)
    if "script" not in values:
        file = f', or script = "train.py" in {values["job"]}' if "job" in values else ""
        raise ConfigError(f"no script given; expected: {USAGE}{file}")
    for name in {"arguments", "option", "env"} & values.keys():
        values[name] = tuple(values[name])
    return LaunchOptions(**values)


def known_flags() -> list[str]:
    """All flags, aliases included."""
    return sorted(flag for flag in parser()._option_string_actions if flag not in REFUSED)


def _by_name(parser: argparse.ArgumentParser) -> Mapping[str, argparse.Action]:
    """The flags that set an option, by its name."""
    refused = (_Refuse, _Version, argparse._HelpAction)
    return {action.dest: action for action in parser._actions if not isinstance(action, refused)}


def _unknown_flag(word: str) -> ConfigError:
    name = word.split("=")[0]
    hint = did_you_mean(name, known_flags()) if name.startswith("--") else "see fleetrun --help"
    return ConfigError(f"unknown flag {name}: {hint}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub("ignored explicit argument (.*)", r"takes no value, got \1", message)
        raise ConfigError(f"{message} (see fleetrun --help)")


class _Refuse(argparse.Action):
    """Refuses a known flag that fleetrun does not support."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        raise refusal(str(option_string))


class _Version(argparse.Action):
    """Prints the version, looked up on demand because that takes time."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        from fleetlight.launch.inventory import version_of

        sys.stdout.write(f"fleetrun {version_of('fleetlight')}\n")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The parser of the flags."""
    parser = _Parser(
        prog="fleetrun",
        usage=USAGE,
        description="Start a distributed PyTorch job, or this machine's part of it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_size(parser.add_argument_group("how many processes"))
    _add_servers(
        parser.add_argument_group(
            "parameter servers",
            "on this machine; on several, list all with --servers and --workers",
        )
    )
    _add_machines(parser.add_argument_group("several machines"))
    _add_engine(
        parser.add_argument_group(
            "engines", "where the counts above are those of the whole job, on any machines"
        )
    )
    running = parser.add_argument_group("running")
    _add_running(running)
    _add_output(running)
    for flag in sorted(REFUSED):
        parser.add_argument(flag, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    # the file of --job may name it
    parser.add_argument("script", nargs="?", help="the training script, or a module name after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the script")
    return parser


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nproc_per_node",
        type=read.positive,
        metavar="N",
        help="workers on this machine (default: one per GPU, else 1)",
    )
    group.add_argument(
        "--gpus",
        "--devices",
        "--selected_gpus",
        type=read.indices,
        metavar="0,1",
        help="one worker on each of these GPUs",
    )


def _add_servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--server_num",
        type=read.count_or_auto,
        metavar="N|auto",
        help="servers on this machine; auto: one for each 4 workers, if cores are free",
    )
    group.add_argument(
        "--worker_num",
        "--trainer_num",
        type=read.count,
        metavar="N",
        help="workers on this machine",
    )
    group.add_argument(
        "--worker_max",
        type=read.positive,
        metavar="N",
        help="let workers join the running job, up to N in total",
    )
    group.add_argument(
        "--join",
        metavar="HOST:PORT|DIR",
        help="add workers to a running job: server 0, or the log folder of the job",
    )
    group.add_argument(
        "--servers", type=read.words, metavar="h:p,..", help="all servers of the job"
    )
    group.add_argument(
        "--workers", "--trainers", type=read.words, metavar="h:p,..", help="all workers of the job"
    )


def _add_machines(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ips", "--cluster_node_ips", type=read.words, metavar="a,b", help="all machines, by rank")
    add("--nnodes", type=read.machine_range, metavar="N|MIN:MAX", help="the number of machines")
    add(
        "--master",
        type=read.endpoint,
        metavar="host:port",
        help="an address and free port of node 0",
    )
    add("--rank", "--node_rank", type=read.count, metavar="R", help="the rank of this machine")
    add("--host", "--node_ip", metavar="ADDRESS", help="the address of this machine")
    add(
        "--use_paddlecloud",
        action="store_true",
        help="read machines from PADDLE_TRAINERS, POD_IP, PADDLE_TRAINER_ID and PADDLE_PORT",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--job", metavar="FILE", help="a TOML file that describes the job; flags override it")
    add(
        "--start_port",
        "--started_port",
        type=read.port,
        metavar="P",
        help="use ports P, P+1, ... (default: free ports)",
    )
    add("--log_dir", metavar="DIR", help="the folder for logs (default: log)")
    add(
        "--max_restarts",
        "--max_restart",
        type=read.count,
        metavar="N",
        help="how often to restart after a failure (default: 0)",
    )
    add("--no_preload", action="store_true", help="let each process load torch itself")
    add(
        "--deadline_s",
        type=read.seconds,
        metavar="S",
        help="how long machines and processes wait for each other (default: 300)",
    )
    add(
        "--grace_s",
        type=read.seconds,
        metavar="S",
        help="time between SIGTERM and SIGKILL (default: 3, with a save 30)",
    )
    add(
        "--sinks",
        metavar="KIND:PLACE,...",
        help="metrics to tensorboard:DIR, mlflow:URI, wandb:PROJECT or python:MODULE.CLASS; "
        "events to opentelemetry:URL",
    )
    add("--checkpoint", metavar="DIR", help="save into DIR periodically, and when stopped")
    add("--resume", action="store_true", help="resume the training of an earlier job")
    add(
        "--ssl",
        metavar="DIR",
        help="TLS between machines and to servers, with the certificates in DIR",
    )
    add(
        "--ssl_expiry_warning_days",
        type=read.days,
        metavar="N",
        help="how many days before its expiry to warn about a certificate (default: 30)",
    )
    add("--token_file", metavar="FILE", help="a file with the job's token (default: FLEET_TOKEN)")
    add("-m", "--module", action="store_true", help="run the script as a module, like python -m")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tee", action="store_true", help="show the output of all processes, each line prefixed")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="show the arguments, what fleetrun chooses, and variables of the first processes",
    )
    add("--dashboard", action="store_true", help="serve a live page of the job on this machine")
    add(
        "--dashboard_port",
        type=read.port,
        metavar="N",
        help="serve the live page on this port (default: a free one)",
    )
    add(
        "-q",
        "--quiet",
        action="store_true",
        help="print only the output of the script, and failures",
    )
    add("--version", action=_Version, nargs=0, help="show the version and exit")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--on",
        metavar="NAME",
        help=f"what runs the job: {', '.join(backends.names())} (default: by the other flags)",
    )
    add("--print", action="store_true", help="print what would be submitted, and submit nothing")
    add("--name", metavar="NAME", help="the name of the job (default: that of the script)")
    for role in ("worker", "server"):
        add(f"--{role}_cpus", type=read.positive, metavar="N", help=f"cores of each {role}")
        add(
            f"--{role}_memory",
            type=read.memory,
            metavar="4G",
            help=f"main memory of each {role}; M, G or T",
        )
    add(
        "--option",
        type=read.pair,
        action="append",
        metavar="NAME=VALUE",
        help="an option of the engine, such as partition=gpu; may be repeated",
    )
    add(
        "--env",
        type=read.pair,
        action="append",
        metavar="NAME=VALUE",
        help="a variable of every process; may be repeated",
    )
