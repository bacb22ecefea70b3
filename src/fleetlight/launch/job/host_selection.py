# SPDX-License-Identifier: Apache-2.0
"""Find the machines of the job, and which of them this one is, from the flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fleetlight.errors import ConfigError
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.launch.job.spec import DEFAULT_PORT, RendezvousSpec
from fleetlight.roles.role import Endpoint, parse_endpoint

LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSelection:
    """This machine's address, the rendezvous with other machines, and its listed endpoints."""

    host: str = LOOPBACK
    rendezvous: RendezvousSpec | None = None
    servers: tuple[Endpoint, ...] = ()
    workers: tuple[Endpoint, ...] = ()


def select_hosts(options: LaunchOptions, machine: Machine, notes: list[str]) -> HostSelection:
    """The machines that the flags select; decisions go to `notes`."""
    _check_combination(options)
    if options.servers or options.workers:
        return _by_endpoints(options, machine, notes)
    if len(options.ips) > 1:
        return _by_list(options, machine, notes)
    if options.nnodes is not None and options.nnodes[1] > 1:
        return _by_master(options, machine, notes)
    return _alone(options, machine, notes)


def _check_combination(options: LaunchOptions) -> None:
    lists = bool(options.servers or options.workers)
    machines = options.nnodes[1] if options.nnodes else 1
    rules = (
        (
            options.ips and options.nnodes not in (None, (len(options.ips),) * 2),
            f"--ips lists {len(options.ips)} machines but --nnodes gives another number; pass one "
            "of the two",
        ),
        (
            options.ips and options.master,
            "with --ips, the first machine serves the rendezvous; omit --master",
        ),
        (
            machines > 1 and not options.ips and options.master is None,
            f"--nnodes {machines} needs --master host:port: an address of node 0 and a free port "
            "there, equal on every machine",
        ),
        (options.master and options.nnodes is None, "--master needs --nnodes N"),
        (
            lists and (options.ips or options.nnodes),
            "--servers and --workers already name the machines; omit --ips and --nnodes",
        ),
        (
            options.rank is not None and options.nnodes is None and not options.ips,
            "--rank needs --nnodes N --master host:port",
        ),
    )
    for broken, message in rules:
        if broken:
            raise ConfigError(message)


def _alone(options: LaunchOptions, machine: Machine, notes: list[str]) -> HostSelection:
    if options.master is not None:
        notes.append("--master has no effect: the job has one machine")
    host = options.host or (options.ips[0] if options.ips else None)
    if host is None:
        return HostSelection()
    return HostSelection(host=_own(machine, host, "--host" if options.host else "--ips"))


def _own(machine: Machine, host: str, flag: str) -> str:
    if not machine.owns(host):
        raise ConfigError(
            f"{flag} {host}: not an address of this machine, which has "
            f"{_listed(machine.outside_addresses)}"
        )
    return machine.resolve(host)


def _listed(addresses: Sequence[str]) -> str:
    return ", ".join(addresses) or "only loopback addresses"


def _by_list(options: LaunchOptions, machine: Machine, notes: list[str]) -> HostSelection:
    hosts = tuple(machine.resolve(host) for host in options.ips)
    _check_different(hosts)
    host = _own_of_list(options, machine, hosts, notes)
    if options.rank is not None and options.rank != hosts.index(host):
        raise ConfigError(
            f"--rank {options.rank} does not fit: {host} has rank {hosts.index(host)} in the list "
            f"{', '.join(hosts)}; omit --rank"
        )
    return HostSelection(
        host=host, rendezvous=_listed_machines(hosts, host, options.start_port or DEFAULT_PORT)
    )


def _listed_machines(hosts: tuple[str, ...], host: str, port: int) -> RendezvousSpec:
    return RendezvousSpec(
        master=(hosts[0], port),
        min_nodes=len(hosts),
        max_nodes=len(hosts),
        hosts=hosts,
        rank=hosts.index(host),
        is_master=host == hosts[0],
    )


def _check_different(hosts: Sequence[str]) -> None:
    twice = [host for host in hosts if hosts.count(host) > 1]
    if twice:
        raise ConfigError(f"--ips lists {twice[0]} twice; list each machine once")


def _own_of_list(
    options: LaunchOptions, machine: Machine, hosts: Sequence[str], notes: list[str]
) -> str:
    if options.host is not None:
        host = _own(machine, options.host, "--host")
        if host not in hosts:
            raise ConfigError(f"--host {host} is not among the machines {', '.join(hosts)}")
        return host
    own = [host for host in hosts if machine.owns(host)]
    if not own:
        raise ConfigError(
            f"none of {', '.join(hosts)} is an address of this machine, which has "
            f"{_listed(machine.outside_addresses)}; list one of those, or pass --host"
        )
    if len(own) > 1:
        raise ConfigError(
            f"{' and '.join(own)} are all addresses of this machine; pass --host with one of them"
        )
    notes.append(f"this machine's address: {own[0]}, from the list")
    return own[0]


def _by_master(options: LaunchOptions, machine: Machine, notes: list[str]) -> HostSelection:
    assert options.master is not None
    assert options.nnodes is not None
    name, port = options.master
    least, most = options.nnodes
    if options.rank is not None and options.rank >= most:
        raise ConfigError(f"--rank {options.rank} is outside 0..{most - 1} of --nnodes {most}")
    address = machine.resolve(name)
    is_master = options.rank == 0 or (options.rank is None and machine.owns(address))
    return HostSelection(
        host=_own_by_route(options, machine, address, notes),
        rendezvous=RendezvousSpec(
            master=(address, port),
            min_nodes=least,
            max_nodes=most,
            rank=options.rank,
            is_master=is_master,
        ),
    )


def _own_by_route(options: LaunchOptions, machine: Machine, master: str, notes: list[str]) -> str:
    if options.host is not None:
        return _own(machine, options.host, "--host")
    if machine.owns(master):
        notes.append(f"this machine's address: {master}, the master's")
        return master
    host = machine.route(master)
    notes.append(f"this machine's address: {host}, from the route to the master (--host overrides)")
    return host


def _by_endpoints(options: LaunchOptions, machine: Machine, notes: list[str]) -> HostSelection:
    servers = _endpoints(options.servers, options, machine, "--servers")
    workers = _endpoints(options.workers, options, machine, "--workers")
    hosts = tuple(dict.fromkeys(host for host, _ in (*servers, *workers)))
    if len(hosts) == 1 or (options.host is None and all(map(machine.owns, hosts))):
        own = _own(machine, hosts[0], "--servers and --workers")
        return HostSelection(host=own, servers=servers, workers=workers)
    host = _own_of_list(options, machine, hosts, notes)
    _warn_if_mixed(servers, hosts, "servers", notes)
    _warn_if_mixed(workers, hosts, "workers", notes)
    used = [port for owner, port in (*servers, *workers) if owner == hosts[0]]
    return HostSelection(
        host=host,
        rendezvous=_listed_machines(hosts, host, options.start_port or max(used) + 1),
        servers=tuple(endpoint for endpoint in servers if endpoint[0] == host),
        workers=tuple(endpoint for endpoint in workers if endpoint[0] == host),
    )


def _endpoints(
    words: Sequence[str], options: LaunchOptions, machine: Machine, flag: str
) -> tuple[Endpoint, ...]:
    if not words:
        given, missing = (
            ("--servers", "--workers") if options.servers else ("--workers", "--servers")
        )
        raise ConfigError(f"{given} needs {missing} too; pass both, equal on every machine")
    for flag_name, count in (
        ("--server_num", options.server_num),
        ("--worker_num", options.worker_num),
    ):
        if count is not None:
            raise ConfigError(f"{flag} lists the processes; omit {flag_name}")
    pairs = [parse_endpoint(word, flag) for word in words]
    found = tuple((machine.resolve(host), port) for host, port in pairs)
    twice = [endpoint for endpoint in found if found.count(endpoint) > 1]
    if twice:
        raise ConfigError(f"{flag} lists {twice[0][0]}:{twice[0][1]} twice; list each process once")
    return found


def _warn_if_mixed(
    endpoints: Sequence[Endpoint], hosts: Sequence[str], what: str, notes: list[str]
) -> None:
    order = [hosts.index(host) for host, _ in endpoints]
    if order != sorted(order):
        notes.append(f"{what} are numbered machine by machine, not in the order of the list")
