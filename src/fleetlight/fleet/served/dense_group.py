# SPDX-License-Identifier: Apache-2.0
"""The group of the workers that average dense gradients among themselves, without the servers."""

from __future__ import annotations

import contextlib

import msgspec

from fleetlight.collective.forming import form
from fleetlight.collective.group import Group
from fleetlight.fleet.job import Job
from fleetlight.ps.transport.listener import bind
from fleetlight.roles.address import route_to
from fleetlight.roles.role import Endpoint
from fleetlight.version import VERSION


def form_dense_group(job: Job) -> Group:
    """Form the group around a store of worker 0, whose address the servers pass on."""
    with contextlib.ExitStack() as held:
        mine = b""
        if job.role.index == 0:
            # the port stays reserved until the store listens there
            reserved = held.enter_context(bind((_own_address(job), 0)))
            # not the address of the socket: a certificate may know only the name
            mine = msgspec.json.encode((_own_address(job), reserved.getsockname()[1]))
        said = job.group.broadcast_bytes(mine, "address of the dense group")
        master = msgspec.json.decode(said, type=Endpoint)
        role = job.role.replace(master=master, master_keeper=None)
        return form(role, VERSION, job.group.deadline_s, job.tls)[1]


def _own_address(job: Job) -> str:
    """The address of this worker that the others reach."""
    return job.role.address or route_to(job.role.server_endpoints[0][0])
