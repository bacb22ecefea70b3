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
    """Reads the role from the environment, in any dialect."""

    @names_arguments
    def __init__(self, is_collective: bool = False, env: Environment | None = None) -> None:
        self.is_collective = is_collective
        self.role = from_environment(env)
        #: what `fleet.init` logs about arguments without effect
        self.remarks: tuple[str, ...] = ()


class UserDefinedRoleMaker(RoleMaker):
    """A role given by the script, for jobs without a launcher."""

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
    return tuple(parse_endpoint(one, where) for one in listed)


def _count(said: int | None, workers: tuple[Endpoint, ...]) -> int:
    if said is not None and workers and said != len(workers):
        raise RoleError(f"worker_num={said}, but worker_endpoints lists {len(workers)}")
    return said if said is not None else max(1, len(workers))


def _master(text: str | None, workers: tuple[Endpoint, ...]) -> Endpoint | None:
    if text is not None:
        return parse_endpoint(text, "master")
    return workers[0] if workers else None
