# SPDX-License-Identifier: Apache-2.0
"""Run an examination from the options of the command line, alone or with other machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fleetlight.errors import ConfigError
from fleetlight.launch.doctor import findings, table
from fleetlight.launch.doctor.facts import facts_of, mtu_of
from fleetlight.launch.doctor.findings import Finding
from fleetlight.launch.doctor.joint_examination import Say, examine_together
from fleetlight.launch.doctor.messages import ExamOptions
from fleetlight.launch.inventory import Machine
from fleetlight.launch.job.host_selection import select_hosts
from fleetlight.launch.job.options import LaunchOptions
from fleetlight.launch.job.token import read_token
from fleetlight.roles.address import is_loopback

#: most machines of an examination, since each pair measures its link
_MAX_MACHINES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of the command."""

    ips: tuple[str, ...] = ()
    host: str | None = None
    port: int
    workers: int | None = None
    seconds: float = 1.0
    deadline_s: float = 60.0
    token_file: str | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """The text to show, and the findings."""

    text: str
    found: list[Finding]

    @property
    def is_fit(self) -> bool:
        """True if no finding is a problem."""
        return not any(finding.is_problem for finding in self.found)


def examine(
    options: DoctorOptions,
    machine: Machine,
    environment: Mapping[str, str],
    say: Say,
    columns: int | None = None,
) -> Result:
    """Examine this machine and, with a list of machines, the links between them.

    `columns`: the width of the terminal that shows the text.
    """
    _check(options)
    workers = options.workers or max(1, machine.gpus)
    if not options.ips:
        return _alone(machine, environment, workers, columns)
    _check_names(options.ips, machine)
    notes: list[str] = []
    flags = LaunchOptions(script="", ips=options.ips, host=options.host, start_port=options.port)
    selection = select_hosts(flags, machine, notes)
    for note in notes:
        say(note)
    hosts = selection.rendezvous.hosts if selection.rendezvous else (selection.host,)
    exam_options = ExamOptions(
        names=options.ips, hosts=hosts, port=options.port, workers=workers, seconds=options.seconds
    )
    facts = facts_of(machine, environment, exam_options, selection.host)
    token = read_token(options.token_file, environment)
    exam = examine_together(
        exam_options, hosts.index(selection.host), facts, options.deadline_s, say, token
    )
    return Result(table.exam_table(exam, columns), findings.exam_findings(exam))


def _alone(
    machine: Machine, environment: Mapping[str, str], workers: int, columns: int | None
) -> Result:
    facts = facts_of(machine, environment, ExamOptions(workers=workers))
    mtus = [mtu_of(interface) for interface, _ in machine.addresses]
    text = table.machine_table(facts, machine.addresses, mtus, columns)
    return Result(text, list(findings.machine_findings(facts)))


def _check(options: DoctorOptions) -> None:
    workers = 1 if options.workers is None else options.workers
    if not 1 <= workers <= 1024:
        raise ConfigError(f"--nproc {options.workers}: expected 1 to 1024 workers")
    if not 1 <= options.port <= 65535 - workers - 1:
        raise ConfigError(f"--port {options.port}: expected 1 to {65535 - workers - 1}")
    for flag, value, most in (
        ("--seconds", options.seconds, 60.0),
        ("--deadline_s", options.deadline_s, 1e6),
    ):
        if not 0 < value <= most:
            raise ConfigError(f"{flag} {value:g}: expected more than 0 and at most {most:g}")
    if len(options.ips) > _MAX_MACHINES:
        raise ConfigError(
            f"--ips lists {len(options.ips)} machines, expected at most {_MAX_MACHINES}"
        )


def _check_names(names: Sequence[str], machine: Machine) -> None:
    """Refuse names that resolve to loopback addresses, at which others cannot connect."""
    found = {name: machine.resolve(name) for name in names}
    outside = any(not is_loopback(address) for address in found.values())
    for name, address in found.items():
        if outside and is_loopback(address):
            raise ConfigError(
                f"{name} resolves to {address} on this machine, where others cannot reach it; "
                "correct /etc/hosts, or list addresses in place of names"
            )
