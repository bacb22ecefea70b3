# SPDX-License-Identifier: Apache-2.0
"""The role and number of this process, and the other processes of the job."""

from __future__ import annotations

from fleetlight.fleet.job import current
from fleetlight.roles import endpoint_text


def is_worker() -> bool:
    """True in a process that trains.

    Returns:
        True in a worker, False in a server.

    Example:
        >>> fleet.init()
        >>> fleet.is_worker()
        True
    """
    return current().role.is_worker


def is_server() -> bool:
    """True in a parameter server.

    Returns:
        True in a server, False in a worker.

    Example:
        >>> fleet.init()
        >>> fleet.is_server()
        False
    """
    return current().role.is_server


def is_first_worker() -> bool:
    """True in worker 0 only.

    Returns:
        True in the worker that should print and write files.

    Example:
        >>> fleet.init()
        >>> if fleet.is_first_worker():
        ...     print("loss 0.25")
        loss 0.25
    """
    return is_worker() and worker_index() == 0


def worker_index() -> int:
    """The number of this worker, from 0.

    Returns:
        The index of this worker.

    Example:
        >>> fleet.init()
        >>> fleet.worker_index()
        0
    """
    return current().role.index or 0


def worker_num() -> int:
    """How many workers the job has; in an elastic job, how many train now.

    Returns:
        The number of workers.

    Example:
        >>> fleet.init()
        >>> fleet.worker_num()
        1
    """
    return current().worker_num


def worker_endpoints() -> list[str]:
    """`host:port` of each worker, if the launcher gave them, else their hosts.

    Returns:
        One text for each worker, in the order of their indices.

    Example:
        >>> fleet.init()
        >>> len(fleet.worker_endpoints()) <= fleet.worker_num()
        True
    """
    job = current()
    if job.role.worker_endpoints:
        return [endpoint_text(endpoint) for endpoint in job.role.worker_endpoints]
    return [hello.address for _, hello in sorted(job.group.hellos.items())]


def server_index() -> int:
    """The number of this server, from 0.

    Returns:
        The index of this server.

    Example:
        >>> fleet.init()
        >>> if fleet.is_server():
        ...     print(fleet.server_index())
    """
    return current().role.index or 0


def server_num() -> int:
    """How many parameter servers the job has.

    Returns:
        The number of server processes; 0 where the server is inside the worker's process.

    Example:
        >>> fleet.init()
        >>> fleet.server_num()
        0
    """
    return current().role.server_num


def server_endpoints() -> list[str]:
    """`host:port` of each parameter server.

    Returns:
        One text for each server, in the order of their indices.

    Example:
        >>> fleet.init()
        >>> fleet.server_endpoints()
        []
    """
    return [endpoint_text(endpoint) for endpoint in current().role.server_endpoints]


def local_rank() -> int:
    """The number of this worker among those of its host, from 0.

    Returns:
        The index of this worker on its host.

    Example:
        >>> fleet.init()
        >>> fleet.local_rank()
        0
    """
    return current().role.local_rank or 0


def node_num() -> int:
    """How many hosts the job runs on.

    Returns:
        The number of hosts.

    Example:
        >>> fleet.init()
        >>> fleet.node_num()
        1
    """
    return current().role.node_num or 1


#: Fleet's other names
rank, nranks, world_size = worker_index, worker_num, worker_num
