# SPDX-License-Identifier: Apache-2.0
"""Role makers: what `fleet.init(role_maker=...)` takes."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlight.errors import RoleError, names_arguments
from fleetlight.roles.dialect import Environment
from fleetlight.roles.environment import from_environment, with_fleet_variables
from fleetlight.roles.role import Endpoint, Kind, Role, parse_endpoint

_INIT_GLOO = (
    "UserDefinedRoleMaker(init_gloo=True) has no effect: workers always have barriers and metrics, "
    "by Gloo in a collective job and by server 0 in a job with servers"
)


class RoleMaker:
    """Reads the role from the environment, in any dialect.

    Args:
        is_collective: True for a job without parameter servers.
        env: the variables to read; by default those of the process.

    Raises:
        RoleError: the variables do not describe one process of a job, or two launchers disagree.

    Example:
        >>> found = {"FLEET_ROLE": "worker", "FLEET_INDEX": "1", "FLEET_WORKER_NUM": "2"}
        >>> maker = fleet.RoleMaker(env={**found, "FLEET_MASTER": "10.0.0.1:7000"})
        >>> maker.role.index, maker.role.worker_num
        (1, 2)
    """

    @names_arguments
    def __init__(self, is_collective: bool = False, env: Environment | None = None) -> None:
        self.is_collective = is_collective
        self.role = from_environment(env)
        #: what `fleet.init` logs about arguments without effect
        self.remarks: tuple[str, ...] = ()


class UserDefinedRoleMaker(RoleMaker):
    """A role given by the script, for jobs without a launcher.

    Args:
        is_collective: True for a job without parameter servers.
        init_gloo: accepted for compatibility with Fleet; without effect.
        current_id: the index of this process.
        role: `"worker"`, `"server"` or `"scheduler"`, or `fleet.Role.WORKER`, `fleet.Role.SERVER`.
        worker_num: the number of workers; by default that of `worker_endpoints`.
        worker_endpoints: `host:port` of each worker.
        server_endpoints: `host:port` of each parameter server.
        master: `host:port` where the job forms; by default the first of `worker_endpoints`.
        device: the index of this worker's GPU.

    Raises:
        RoleError: the arguments do not fit together.

    Example:
        >>> maker = fleet.UserDefinedRoleMaker(
        ...     current_id=0, role=fleet.Role.SERVER, worker_num=2,
        ...     server_endpoints=["10.0.0.1:7000", "10.0.0.2:7000"],
        ... )
        >>> maker.role.server_num
        2
    """

    @names_arguments
    def __init__(
        self,
        is_collective: bool = False,
        init_gloo: bool = False,
        *,
        current_id: int = 0,
        role: Kind | str = Kind.WORKER,
        worker_num: int | None = None,
        worker_endpoints: Sequence[str] = (),
        server_endpoints: Sequence[str] = (),
        master: str | None = None,
        device: int | None = None,
    ) -> None:
        self.is_collective = is_collective
        self.remarks = (_INIT_GLOO,) if init_gloo else ()
        workers = _endpoints(worker_endpoints, "worker_endpoints")
        servers = _endpoints(server_endpoints, "server_endpoints")
        made = Role(
            dialect="UserDefinedRoleMaker",
            kind=_kind(role),
            index=current_id,
            worker_num=_count(worker_num, workers),
            server_num=len(servers),
            worker_endpoints=workers,
            server_endpoints=servers,
            master=_master(master, workers),
            device=device,
        )
        self.role = with_fleet_variables(made.with_host_ranks() if made.is_worker else made)


def _kind(role: Kind | str) -> Kind:
    try:
        return Kind(role.lower())
    except ValueError:
        raise RoleError(f"role={role!r}, expected worker, server or scheduler") from None


def _endpoints(listed: Sequence[str], where: str) -> tuple[Endpoint, ...]:
    if isinstance(listed, str):
        raise RoleError(f"{where}: got the string {listed!r}, expected a list of host:port")
    return tuple(parse_endpoint(text, where) for text in listed)


def _count(stated: int | None, workers: tuple[Endpoint, ...]) -> int:
    if stated is not None and workers and stated != len(workers):
        raise RoleError(f"worker_num={stated}, but worker_endpoints lists {len(workers)}")
    return stated if stated is not None else max(1, len(workers))


def _master(text: str | None, workers: tuple[Endpoint, ...]) -> Endpoint | None:
    if text is not None:
        return parse_endpoint(text, "master")
    return workers[0] if workers else None
