# SPDX-License-Identifier: Apache-2.0
"""`fleetlight dashboard`: the page of a job, even after its end."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from fleetlight.cli import flag_values as read
from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import ANY_PORT
from fleetlight.launch.processes.followers import dashboard

_GRAFANA = "grafana.json"


def add_dashboard(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `fleetlight`."""
    parser = commands.add_parser(
        "dashboard",
        help="show the live page of a job, which may have ended",
        description="Serves the page of a job on this machine until Ctrl-C, and prints its link.",
    )
    parser.add_argument("folder", nargs="?", metavar="LOGDIR", help="the log folder of the job")
    parser.add_argument(
        "--port", type=read.port, default=ANY_PORT, help="its port (default: a free one)"
    )
    parser.add_argument(
        "--grafana", action="store_true", help="print a dashboard for Grafana, and end"
    )
    # fleetrun has bound the port
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(command=_dashboard)


def _dashboard(found: argparse.Namespace) -> int:
    if found.grafana:
        import fleetlight.dashboard

        path = Path(fleetlight.dashboard.__file__).with_name(_GRAFANA)
        sys.stdout.write(path.read_text(encoding="utf-8"))
        return 0
    if found.folder is None:
        raise ConfigError("fleetlight dashboard: pass LOGDIR, the log folder of a job")
    folder = Path(found.folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected the log folder of a job")
    dashboard.check_packages()
    # slow, so only here, and before there is a token that a signal might leave
    import fleetlight.dashboard.server

    if found.descriptor is not None:
        listener, token = socket.socket(fileno=found.descriptor), dashboard.read_token(folder)
        return _serve(folder, listener, token, shown="")
    listener = dashboard.listen(found.port, "--port")
    if (folder / dashboard.TOKEN_FILE).exists():
        # the job's own page uses it, and so may what reads its metrics
        token = dashboard.read_token(folder)
        return _serve(folder, listener, token, dashboard.link(listener, token))
    token = dashboard.make_token(folder)
    try:
        return _serve(folder, listener, token, dashboard.link(listener, token))
    finally:
        dashboard.remove_token(folder, token)


def _serve(folder: Path, listener: socket.socket, token: str, shown: str) -> int:
    from fleetlight.dashboard import server

    def ready() -> None:
        if shown:
            print(f"fleetlight: page: {shown}", flush=True)

    with listener:
        server.serve(folder, listener, token, ready)
    return 0
