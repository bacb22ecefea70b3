# SPDX-License-Identifier: Apache-2.0
"""The default backend: all processes of the job on this machine."""

from __future__ import annotations

import dataclasses
import secrets

from fleetlight.errors import ConfigError
from fleetlight.launch import session
from fleetlight.launch.backends import Backend
from fleetlight.launch.backends.processes.control import LogFolderControl
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.machines.other_machines import NoOtherMachines
from fleetlight.launch.screen import Screen
from fleetlight.roles.secret import Secret


def _run(job: JobSpec, screen: Screen) -> int:
    if job.machine.rendezvous is not None:
        raise ConfigError(
            "--on processes runs the job on this machine only, but other flags name several "
            "machines; use --on hosts, or omit --on"
        )
    return session.run(_with_token(job), screen, lambda interrupts: NoOtherMachines())


def _with_token(job: JobSpec) -> JobSpec:
    """Give the job a random token if the user gave none."""
    if job.token is not None:
        return job
    return dataclasses.replace(job, token=Secret(secrets.token_hex(32)))


BACKEND = Backend(run=_run, control=LogFolderControl())
