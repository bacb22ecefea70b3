# SPDX-License-Identifier: Apache-2.0
"""Named hosts: the user starts fleetrun on each host, and node 0 serves the rendezvous."""

from __future__ import annotations

from fleetlight.errors import ConfigError
from fleetlight.launch import session
from fleetlight.launch.backends import Backend
from fleetlight.launch.backends.processes.control import LogFolderControl
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.machines.connected_machines import ConnectedMachines
from fleetlight.launch.machines.other_machines import OtherMachines
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.screen import Screen


def _run(job: JobSpec, screen: Screen) -> int:
    spec = job.machine.rendezvous
    if spec is None:
        raise ConfigError(
            "--on hosts needs the hosts: pass --ips A,B or --nnodes N --master host:port, or omit "
            "--on"
        )

    def connect(interrupts: Interrupts) -> OtherMachines:
        return ConnectedMachines(job, spec, screen, interrupts)

    return session.run(job, screen, connect)


BACKEND = Backend(run=_run, control=LogFolderControl())
