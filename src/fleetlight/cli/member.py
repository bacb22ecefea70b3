# SPDX-License-Identifier: Apache-2.0
"""`fleetlight member`: run one process of a job that an engine starts."""

from __future__ import annotations

import argparse
import os
import sys

from fleetlight.errors import ConfigError, FleetError


def add_member(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `fleetlight`."""
    member = commands.add_parser(
        "member",
        help="run one process of a job that an engine starts",
        usage="fleetlight member [--restarts N] [--] COMMAND ...",
        description="Runs the command with the variables that fleetrun sets, passes signals on, "
        "prints one line about its end, and exits with a code that tells the engine what to do.",
    )
    member.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart the command here, at most N times, where that can help (default: 0)",
    )
    member.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command")
    member.set_defaults(command=_member)


def _member(found: argparse.Namespace) -> int:
    from fleetlight.launch import exit_codes, member

    words = found.words[1:] if found.words[:1] == ["--"] else found.words
    try:
        if not words:
            raise ConfigError(
                "fleetlight member: got no command; expected one, as in: fleetlight member -- "
                "python train.py"
            )
        if found.restarts < 0:
            raise ConfigError(f"--restarts {found.restarts}: expected 0 or more")
        return member.run(words, found.restarts, _say, os.environ)
    except FleetError as error:
        _say(f"error: {error}")
        return exit_codes.error_code(error)


def _say(text: str) -> None:
    # standard output belongs to the command
    # one write: processes of a host may share the file
    sys.stderr.write(f"fleetlight: {text}\n")
    sys.stderr.flush()
