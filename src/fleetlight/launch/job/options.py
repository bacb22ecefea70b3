# SPDX-License-Identifier: Apache-2.0
"""`LaunchOptions`: the command line, and a cloud launcher's environment, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from fleetlight.errors import ConfigError

#: the value of `--server_num` that lets the plan choose
AUTO: Final = "auto"
#: for the live page: a free port
ANY_PORT: Final = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The user's flags, each checked separately but not yet against the machine."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    nproc_per_node: int | None = None
    gpus: tuple[int, ...] | None = None
    ips: tuple[str, ...] = ()
    nnodes: tuple[int, int] | None = None
    master: tuple[str, int] | None = None
    rank: int | None = None
    #: AUTO: the plan chooses
    server_num: int | Literal["auto"] | None = None
    worker_num: int | None = None
    #: how many workers the job may have while it runs
    worker_max: int | None = None
    #: the running job that the workers join: server 0, or the log folder of the job
    join: str | None = None
    servers: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    log_dir: str = "log"
    host: str | None = None
    start_port: int | None = None
    max_restarts: int = 0
    tee: bool = False
    no_preload: bool = False
    dashboard: bool = False
    dashboard_port: int | None = None
    verbose: bool = False
    quiet: bool = False
    #: None: the defaults of launchers and of processes
    deadline_s: float | None = None
    #: None: the default of the job
    grace_s: float | None = None
    use_paddlecloud: bool = False
    ssl: str | None = None
    ssl_expiry_warning_days: int | None = None
    checkpoint: str | None = None
    sinks: str | None = None
    resume: bool = False
    token_file: str | None = None
    #: the name of the backend; None: the other flags decide
    on: str | None = None
    #: print what the engine would get, and submit nothing
    print: bool = False
    #: the name of the job in an engine
    name: str = ""
    worker_cpus: int | None = None
    server_cpus: int | None = None
    #: MiB
    worker_memory: int | None = None
    server_memory: int | None = None
    #: (name, value) pairs for the engine, and for the environment of every process
    option: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    #: the file that describes the job
    job: str | None = None
    #: what an error calls an option -> its file, section and key, for options from that file
    places: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def page_port(self) -> int | None:
        """The port of the live page; `--dashboard_port` alone asks for one, too. None: no page."""
        port = self.dashboard_port
        return ANY_PORT if port is None and self.dashboard else port


def from_cloud(options: LaunchOptions, environment: Mapping[str, str]) -> LaunchOptions:
    """Read the machines from the cloud launcher's environment (`--use_paddlecloud`)."""
    if not options.use_paddlecloud:
        return options
    missing = [name for name in ("PADDLE_TRAINERS", "POD_IP") if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"--use_paddlecloud needs {' and '.join(missing)} in the environment; set "
            "PADDLE_TRAINERS=ip,ip and POD_IP, or use --ips"
        )
    hosts = [host.strip() for host in environment["PADDLE_TRAINERS"].split(",")]
    return dataclasses.replace(
        options,
        ips=tuple(host for host in hosts if host),
        host=options.host or environment["POD_IP"],
        start_port=options.start_port or _number(environment, "PADDLE_PORT"),
        rank=_number(environment, "PADDLE_TRAINER_ID") if options.rank is None else options.rank,
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if text and not text.isdigit():
        raise ConfigError(f"{name}: got {text!r}, expected a number")
    return int(text) if text else None
