# SPDX-License-Identifier: Apache-2.0
"""`fleetlight`: small tools around a job."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence

from fleetlight.errors import FleetError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    found = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = found.command
    try:
        return command(found)
    except FleetError as error:
        print(f"fleetlight: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fleetlight", description="Tools around Fleetlight jobs.")
    commands = parser.add_subparsers(required=True, metavar="command")
    version = commands.add_parser("version", help="versions of fleetlight, python and torch")
    version.set_defaults(command=_version)
    export = commands.add_parser("export", help="a checkpoint as one plain safetensors file")
    export.add_argument("dirname", metavar="DIR", help="the folder save_persistables wrote")
    export.add_argument("out", metavar="OUT.safetensors", help="the file to write")
    export.set_defaults(command=_export)
    cert = commands.add_parser("cert", help="certificates for encrypted connections (--ssl)")
    cert.add_argument("folder", metavar="DIR", help="the folder to write them to")
    cert.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or address of a machine that runs servers, beside this one; may be repeated",
    )
    cert.add_argument("--days", type=int, default=365, help="how long they are valid (365)")
    cert.add_argument("--replace", action="store_true", help="make all anew where there are some")
    cert.set_defaults(command=_cert)
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
