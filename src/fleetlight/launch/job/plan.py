# SPDX-License-Identifier: Apache-2.0
"""Turn the user's options and the machine's facts into a `JobSpec` or a clear error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.encryption import read_encryption
from fleetlight.launch.job.environment import is_set_by_launcher
from fleetlight.launch.job.host_selection import HostSelection, select_hosts
from fleetlight.launch.job.join_point import JoinPoint, join_point
from fleetlight.launch.job.options import AUTO, LaunchOptions
from fleetlight.launch.job.spec import (
    DEADLINE_S,
    EngineSpec,
    JobSpec,
    MachineSpec,
    RendezvousSpec,
    Resources,
    RoleSpec,
    Sinks,
)
from fleetlight.launch.job.token import OPEN, OPEN_COLLECTIVE, read_token
from fleetlight.roles.role import MAX_PLACES, Kind
from fleetlight.roles.secret import Secret
from fleetlight.store import absolute
from fleetlight.strategy.features.sinks import OPENTELEMETRY, SINK_KINDS
from fleetlight.strategy.features.ssl import Encryption

#: defaults of the time between SIGTERM and SIGKILL, without and with a save
_GRACE_S, _STOP_S = 3.0, 30.0
#: one server costs a half to an eighth of the CPU time of its workers, by the model
_WORKERS_PER_SERVER = 4


def plan(
    options: LaunchOptions, machine: Machine | None, environment: Mapping[str, str] | None = None
) -> JobSpec:
    """The job, or this machine's part of it; `environment` may have the token.

    `machine` is None if the backend chooses the machines.
    """
    notes: list[str] = []
    _refuse_engine_flags(options, is_placed_here=machine is not None)
    is_placed_elsewhere = machine is None
    if machine is None:
        _refuse_machines(options)
        machine = _machine_for(options)
    point = _join_point(options, environment or {})
    hosts = select_hosts(options, machine, notes)
    collective = not asks_for_servers(options)
    if point is not None:
        worker, server, devices = _joining(options, machine, notes)
    elif collective:
        worker, server, devices = _collective(options, machine, notes)
    else:
        worker, server, devices = _with_servers(options, machine, hosts, notes)
    encryption = read_encryption(options, environment or {})
    is_open = options.ssl is None and (is_placed_elsewhere or _has_several(hosts))
    token = _token(options, environment or {}, is_open, is_placed_elsewhere, notes)
    cpus = max(1, machine.cores // max(1, worker.count + server.count))
    return JobSpec(
        script=options.script,
        arguments=options.arguments,
        is_module=options.module,
        collective=collective,
        worker=_with_resources(
            worker, options.worker_cpus or cpus, options.worker_memory, gpus=1 if devices else 0
        ),
        server=_with_resources(server, options.server_cpus or cpus, options.server_memory, gpus=0),
        machine=MachineSpec(
            host=hosts.host,
            interface=machine.interface(hosts.host),
            rendezvous=_encrypted(hosts.rendezvous, encryption),
            start_port=_first_port(options, hosts),
            devices=devices,
            workers=hosts.workers,
            servers=hosts.servers,
        ),
        engine=_engine(options),
        log_dir=options.log_dir,
        max_restarts=options.max_restarts,
        tee=options.tee,
        dashboard=options.page_port,
        preload=not options.no_preload,
        deadline_s=DEADLINE_S if options.deadline_s is None else options.deadline_s,
        process_deadline_s=options.deadline_s,
        log_level=_log_level(options),
        grace_s=_GRACE_S if options.grace_s is None else options.grace_s,
        stop_s=_STOP_S if options.grace_s is None else options.grace_s,
        ssl=encryption,
        worker_max=_worker_max(options, worker.count, collective=collective),
        join=None if point is None else point.server,
        checkpoint=_folder(options),
        sinks=_sinks(options, is_placed_elsewhere=is_placed_elsewhere),
        resume=options.resume,
        token=token if point is None else point.token,
        notes=tuple(notes),
    )


def _log_level(options: LaunchOptions) -> str:
    if options.verbose and options.quiet:
        raise ConfigError("--verbose and --quiet: expected one of them; omit the other")
    return "debug" if options.verbose else "warning" if options.quiet else ""


def _sinks(options: LaunchOptions, *, is_placed_elsewhere: bool) -> Sinks:
    if options.sinks is None:
        return Sinks()
    metrics, events = [], None
    for one in filter(None, map(str.strip, options.sinks.split(","))):
        kind, _, place = one.partition(":")
        if kind == OPENTELEMETRY:
            events = place
        elif kind in SINK_KINDS:
            metrics.append(one)
        else:
            known = did_you_mean(kind, (*SINK_KINDS, OPENTELEMETRY))
            raise ConfigError(f"--sinks {options.sinks}: got {one!r}; {known}")
    if events and not events.startswith(("http://", "https://")):
        raise ConfigError(
            f"--sinks {OPENTELEMETRY}:{events}: expected the address of a collector, such as "
            f"{OPENTELEMETRY}:http://collector:4318"
        )
    if events is not None and is_placed_elsewhere:
        raise ConfigError(
            f"--sinks {OPENTELEMETRY}: sends what fleetrun records of processes that it starts "
            f"itself, not of a job with --on {options.on}; omit it"
        )
    return Sinks(metrics=",".join(metrics), events=events)


def _join_point(options: LaunchOptions, environment: Mapping[str, str]) -> JoinPoint | None:
    """The running job that the workers join, if any."""
    if options.join is None:
        return None
    given = ("server_num", "servers", "workers", "worker_max", "checkpoint", "resume", "nnodes")
    more = [name for name in (*given, "ips") if getattr(options, name)]
    if more:
        raise ConfigError(
            f"--join adds workers to a running job, and --{more[0]} describes a job of its own; "
            "omit one of them"
        )
    point = join_point(options.join, read_token(options.token_file, environment))
    if point.token is None:
        where = f" with --on {options.on}" if options.on is not None else ""
        raise ConfigError(
            f"--join {options.join}{where}: workers need the token of the job that they join; give "
            "FLEET_TOKEN or --token_file, here and where that job starts, or on its machine pass "
            "--join LOG_DIR"
        )
    return point


def _joining(
    options: LaunchOptions, machine: Machine, notes: list[str]
) -> tuple[RoleSpec, RoleSpec, tuple[int, ...]]:
    """The workers that join a running job."""
    if options.worker_num is not None and options.nproc_per_node is not None:
        raise ConfigError(
            f"--worker_num {options.worker_num} and --nproc_per_node {options.nproc_per_node} both "
            "say how many workers join; omit one of them"
        )
    workers = options.nproc_per_node if options.worker_num is None else options.worker_num
    if workers is None:
        workers = 1 if options.gpus is None else len(options.gpus)
    if not workers:
        raise ConfigError("--join adds workers: pass --worker_num N, at least 1")
    devices = _server_job_devices(options, machine, workers, notes)
    return RoleSpec(kind=Kind.WORKER, count=workers), RoleSpec(kind=Kind.SERVER), devices


def _worker_max(options: LaunchOptions, workers: int, *, collective: bool) -> int | None:
    if options.worker_max is None:
        return None
    if collective:
        raise ConfigError(
            "--worker_max lets workers join while the job runs, which needs parameter servers; "
            "pass --server_num and --worker_num, or --nnodes MIN:MAX for machines that come and go"
        )
    if options.worker_max < workers:
        raise ConfigError(
            f"--worker_max {options.worker_max}: the job starts with {workers} workers; pass a "
            "number that is not smaller"
        )
    if options.worker_max > MAX_PLACES:
        raise ConfigError(f"--worker_max {options.worker_max}: expected at most {MAX_PLACES}")
    return options.worker_max


def asks_for_servers(options: LaunchOptions) -> bool:
    """True for a parameter-server job."""
    counts = (options.server_num, options.worker_num)
    return any(count is not None for count in counts) or bool(options.servers or options.workers)


def _encrypted(spec: RendezvousSpec | None, encryption: Encryption | None) -> RendezvousSpec | None:
    return None if spec is None else dataclasses.replace(spec, ssl=encryption)


def _engine(options: LaunchOptions) -> EngineSpec:
    return EngineSpec(name=options.name, options=dict(options.option), variables=dict(options.env))


def _folder(options: LaunchOptions) -> str | None:
    # a script may change its working directory
    return None if options.checkpoint is None else absolute(options.checkpoint)


def _token(
    options: LaunchOptions,
    environment: Mapping[str, str],
    is_open: bool,
    is_placed_elsewhere: bool,
    notes: list[str],
) -> Secret | None:
    """The user's token; without one, a note if other machines can reach the ports.

    An engine makes one for a job with servers where the user gives none.
    """
    token = read_token(options.token_file, environment)
    if not is_open:
        return token
    if not asks_for_servers(options):
        notes.append(OPEN_COLLECTIVE)
    elif token is None and not is_placed_elsewhere:
        notes.append(OPEN)
    return token


def _has_several(hosts: HostSelection) -> bool:
    return hosts.rendezvous is not None and hosts.rendezvous.max_nodes > 1


def _refuse_engine_flags(options: LaunchOptions, *, is_placed_here: bool) -> None:
    """Refuse flags for an engine where fleetrun starts the processes itself."""
    names = ("print", "name", "worker_cpus", "server_cpus", "worker_memory", "server_memory")
    given = [name for name in (*names, "option", "env") if getattr(options, name)]
    if is_placed_here and given:
        raise ConfigError(
            f"--{given[0]} is for an engine that places the processes; add --on NAME, or omit it"
        )
    local = [name for name in ("tee", "no_preload") if getattr(options, name)]
    if not is_placed_here and options.page_port is not None:
        raise ConfigError(
            f"--dashboard shows a job that fleetrun itself runs, not one with --on {options.on}; "
            "omit it"
        )
    if not is_placed_here and local:
        raise ConfigError(
            f"--{local[0]} is for processes that fleetrun starts itself; omit it with --on"
        )
    for name, _ in options.env:
        if is_set_by_launcher(name):
            raise ConfigError(
                f"--env {name}: the engine sets this variable for each process, and a secret must "
                "not be part of a job's description; omit it (--token_file has the token)"
            )


def _refuse_machines(options: LaunchOptions) -> None:
    """Refuse flags that name machines for a backend that chooses them."""
    names = ("ips", "nnodes", "master", "rank", "servers", "workers", "host", "start_port")
    given = [name for name in names if getattr(options, name) not in (None, ())]
    if given:
        raise ConfigError(
            f"--{given[0]} names machines or ports, but --on {options.on} chooses them; omit "
            f"{' and '.join(f'--{name}' for name in given)}"
        )
    if options.server_num == AUTO:
        raise ConfigError(
            f"--server_num {AUTO} counts the cores of this machine, but --on {options.on} chooses "
            "the machines; pass --server_num N"
        )


def _machine_for(options: LaunchOptions) -> Machine:
    """A machine with the GPUs that the flags ask for; the backend finds a real one."""
    return Machine(gpus=1 + max(options.gpus or (), default=-1))


def _with_resources(role: RoleSpec, cpus: int, memory_mib: int | None, gpus: int) -> RoleSpec:
    resources = Resources(cpus=cpus, gpus=gpus, memory_mib=memory_mib)
    return dataclasses.replace(role, resources=resources)


def _first_port(options: LaunchOptions, hosts: HostSelection) -> int | None:
    """The first fixed endpoint port; None: any free ports."""
    if options.start_port is None or hosts.workers:
        return None
    # The rendezvous of listed machines is at --start_port of the first one.
    return options.start_port + (hosts.rendezvous is not None and bool(hosts.rendezvous.hosts))


def _collective(
    options: LaunchOptions, machine: Machine, notes: list[str]
) -> tuple[RoleSpec, RoleSpec, tuple[int, ...]]:
    devices = _devices(options, machine)
    count = options.nproc_per_node
    if devices and count is not None and count != len(devices):
        raise ConfigError(
            f"--gpus names {len(devices)} GPUs but --nproc_per_node is {count}; one worker runs on "
            "each GPU, so pass one of the two"
        )
    if not devices:
        count = count or machine.gpus or 1
        devices = tuple(range(count)) if count <= machine.gpus else ()
        if machine.gpus and not devices:
            notes.append(
                f"{count} workers need one GPU each and this machine has {machine.gpus}: using "
                "CPUs (--gpus chooses GPUs)"
            )
    worker = RoleSpec(kind=Kind.WORKER, count=count or len(devices))
    return worker, RoleSpec(kind=Kind.SERVER), devices


def _devices(options: LaunchOptions, machine: Machine) -> tuple[int, ...]:
    if options.gpus is None:
        return ()
    if not machine.gpus:
        raise ConfigError(
            f"--gpus {_listed(options.gpus)}: this machine has no GPU; use --nproc_per_node "
            f"{len(options.gpus)} to train on its CPUs"
        )
    return _present(options.gpus, machine)


def _present(gpus: tuple[int, ...], machine: Machine) -> tuple[int, ...]:
    missing = [gpu for gpu in gpus if gpu >= machine.gpus]
    if missing:
        raise ConfigError(
            f"--gpus {_listed(gpus)}: this machine has {machine.gpus} GPUs, numbered 0 to "
            f"{machine.gpus - 1}; there is no GPU {_listed(missing)}"
        )
    return gpus


def _listed(gpus: list[int] | tuple[int, ...]) -> str:
    return ",".join(map(str, gpus))


def _with_servers(
    options: LaunchOptions, machine: Machine, hosts: HostSelection, notes: list[str]
) -> tuple[RoleSpec, RoleSpec, tuple[int, ...]]:
    if options.nproc_per_node is not None:
        raise ConfigError(
            "--nproc_per_node counts collective workers; with servers use --worker_num"
        )
    if options.servers or options.workers:
        servers, workers = len(hosts.servers), len(hosts.workers)
    else:
        servers, workers = _counts(options, machine, notes, alone=hosts.rendezvous is None)
    devices = _server_job_devices(options, machine, workers, notes)
    return (
        RoleSpec(kind=Kind.WORKER, count=workers),
        RoleSpec(kind=Kind.SERVER, count=servers),
        devices,
    )


def _counts(
    options: LaunchOptions, machine: Machine, notes: list[str], *, alone: bool
) -> tuple[int, int]:
    """Servers and workers of this machine; of several machines, one may have only servers."""
    workers = options.worker_num
    if workers is None and options.gpus is not None:
        workers = len(options.gpus)
    servers = options.server_num
    if servers == AUTO:
        servers = _chosen(options, machine, workers, notes)
    if alone or servers is None or workers is None:
        if not servers:
            raise ConfigError(
                "a parameter-server job needs servers: pass --server_num N; for training without "
                f"servers use --nproc_per_node {workers or 'N'} instead of --worker_num"
                + ("" if alone else "; on a machine without servers, pass --server_num 0")
            )
        if not workers:
            none = "" if alone else "; on a machine without workers, pass --worker_num 0"
            raise ConfigError(f"a parameter-server job needs workers: pass --worker_num N{none}")
    if not servers and not workers:
        raise ConfigError(
            "this machine has no process: --server_num and --worker_num are both 0; raise one"
        )
    return servers, workers


def _chosen(options: LaunchOptions, machine: Machine, workers: int | None, notes: list[str]) -> int:
    """The number of servers for `--server_num auto`: those that workers need and cores can run."""
    if not workers:
        raise ConfigError(
            f"--server_num {AUTO} chooses by the workers of this machine: pass --worker_num N, or "
            "--server_num N for a machine without workers"
        )
    wanted, free = -(-workers // _WORKERS_PER_SERVER), machine.cores - workers
    chosen = max(1, min(wanted, free))
    notes.append(
        f"--server_num {AUTO}: {chosen}, for {workers} workers on {machine.cores} cores (one for "
        f"each {_WORKERS_PER_SERVER} workers, at most one for each core without a worker)"
    )
    return chosen


def _server_job_devices(
    options: LaunchOptions, machine: Machine, workers: int, notes: list[str]
) -> tuple[int, ...]:
    if options.gpus is None:
        return ()
    if not machine.gpus:
        notes.append(f"--gpus {_listed(options.gpus)}: this machine has no GPU; workers use CPUs")
        return ()
    if workers != len(options.gpus):
        raise ConfigError(
            f"--gpus names {len(options.gpus)} GPUs but this machine runs {workers} workers; name "
            "one GPU for each worker"
        )
    return _present(options.gpus, machine)
