# SPDX-License-Identifier: Apache-2.0
"""`fleetlight`: tools around a job."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence

from fleetlight.cli.jobs import add_jobs
from fleetlight.cli.member import add_member
from fleetlight.cli.stored.checkpoints import add_checkpoints
from fleetlight.cli.stored.tables import add_table
from fleetlight.cli.terminal import output
from fleetlight.cli.watch.dashboard import add_dashboard
from fleetlight.cli.watch.events import add_events
from fleetlight.cli.watch.top import add_top
from fleetlight.cli.watch.trace import add_trace
from fleetlight.errors import ConfigError, FleetError, counted
from fleetlight.launch import backends
from fleetlight.launch.job.spec import DEFAULT_PORT
from fleetlight.observe.console import Tone


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        found = parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = found.command
        return command(found)
    except FleetError as error:
        output.complain("fleetlight", error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `fleetlight logs log | head`: Python must not write the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="fleetlight", description="Tools around Fleetlight jobs.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(command=lambda found: _without_command(parser, found))
    commands = parser.add_subparsers(metavar="command")
    version = commands.add_parser("version", help="print the versions of fleetlight, python, torch")
    version.set_defaults(command=_version)
    export = commands.add_parser("export", help="write a checkpoint as one safetensors file")
    export.add_argument("dirname", metavar="DIR", help="the folder or URL of save_persistables")
    export.add_argument("out", metavar="OUT.safetensors", help="the file to write")
    export.set_defaults(command=_export)
    cert = commands.add_parser("cert", help="make certificates for encrypted connections (--ssl)")
    cert.add_argument("folder", metavar="DIR", help="the folder for the certificates")
    cert.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or address of another machine that runs servers; may be repeated",
    )
    cert.add_argument("--days", type=int, default=365, help="their validity (default: 365)")
    cert.add_argument("--replace", action="store_true", help="replace existing certificates")
    cert.set_defaults(command=_cert)
    add_checkpoints(commands)
    add_table(commands)
    _add_doctor(commands)
    add_jobs(commands)
    add_dashboard(commands)
    add_events(commands)
    add_member(commands)
    add_top(commands)
    add_trace(commands)
    _add_completion(commands)
    return parser


def _without_command(parser: argparse.ArgumentParser, found: argparse.Namespace) -> int:
    if found.version:
        from fleetlight.launch.inventory import version_of

        print(f"fleetlight {version_of('fleetlight')}")
    else:
        parser.print_help()
    return 0


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script by which a shell completes commands and flags",
        description='For bash: eval "$(fleetlight completion bash)" in ~/.bashrc. For zsh: the '
        "same with zsh in ~/.zshrc. For fish: fleetlight completion fish > "
        "~/.config/fish/completions/fleetlight.fish, and the same to fleetrun.fish.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    completion.set_defaults(command=_completion)


def _completion(found: argparse.Namespace) -> int:
    from fleetlight.cli import arguments

    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "fleetlight completion needs the package shtab: pip install 'fleetlight[completion]'"
        ) from None
    launcher = arguments.parser()
    # the parser takes any text, so that an unknown engine is an error that names the known ones
    launcher._option_string_actions["--on"].choices = backends.names()
    for one in (launcher, parser()):
        _offer_files(one, shtab.FILE)
        print(shtab.complete(one, found.shell))
    return 0


def _offer_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Let shells complete names of files where the words are not known."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _offer_files(inner, files)
        elif action.nargs != 0 and not action.choices:
            vars(action)["complete"] = files


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check machines and the network between them",
        description="Checks this machine. With --ips, run it on each machine at the same time: it "
        "checks all machines and the network between them. Exit code 0: fit, 1: not fit.",
    )
    doctor.add_argument("--ips", default="", metavar="A,B", help="the machines, as for fleetrun")
    doctor.add_argument("--host", metavar="ADDRESS", help="the address of this machine")
    doctor.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"the port of the doctors; those after it are checked (default: {DEFAULT_PORT})",
    )
    doctor.add_argument(
        "--nproc", type=int, metavar="N", help="workers per machine (default: one per GPU)"
    )
    doctor.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="how long to measure each link (default: 1)",
    )
    doctor.add_argument(
        "--deadline_s",
        type=float,
        default=60.0,
        metavar="S",
        help="how long to wait for all machines (default: 60)",
    )
    doctor.add_argument(
        "--token_file", metavar="FILE", help="a file with the token (default: FLEET_TOKEN)"
    )
    doctor.set_defaults(command=_doctor)


def _version(found: argparse.Namespace) -> int:
    from fleetlight.launch.inventory import version_of

    print(f"fleetlight {version_of('fleetlight')}")
    print(f"torch {version_of('torch')}")
    print(f"python {platform.python_version()}")
    return 0


def _export(found: argparse.Namespace) -> int:
    from fleetlight.checkpoint import export

    export(found.dirname, found.out)
    print(f"wrote {found.out}")
    return 0


def _cert(found: argparse.Namespace) -> int:
    from fleetlight.security.certificates import make

    for path in make(found.folder, found.host, found.days, replace=found.replace):
        print(f"wrote {path}")
    print(f"copy the folder to every machine of the job, then: fleetrun --ssl {found.folder} ...")
    return 0


def _doctor(found: argparse.Namespace) -> int:
    from fleetlight.launch import inventory
    from fleetlight.launch.doctor import table
    from fleetlight.launch.doctor.examination import DoctorOptions, examine

    ips = tuple(word.strip() for word in found.ips.split(",") if word.strip())
    if found.ips and not ips:
        raise ConfigError(f"--ips {found.ips!r} names no machine; omit it to check only this one")
    wish = DoctorOptions(
        ips=ips,
        host=found.host,
        port=found.port,
        workers=found.nproc,
        seconds=found.seconds,
        deadline_s=found.deadline_s,
        token_file=found.token_file,
    )
    width = output.columns()
    result = examine(wish, inventory.this_machine(os.environ), os.environ, _say, width)
    print(f"\n{result.text}\n")
    if result.found:
        print(f"{table.finding_lines(result.found, width, colour=output.colour())}\n")
    problems = sum(finding.is_problem for finding in result.found)
    if result.is_fit:
        output.say("fit", Tone.GOOD)
        return 0
    output.say(f"not fit: {counted(problems, 'problem')}", Tone.BAD)
    return 1


def _say(text: str) -> None:
    output.print_fitted(f"fleetlight: {text}")


if __name__ == "__main__":
    sys.exit(main())
