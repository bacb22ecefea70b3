# SPDX-License-Identifier: Apache-2.0
"""The variables of PaddlePaddle Fleet's launchers and operators, `PADDLE_*`."""

from __future__ import annotations

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Dialect, Variables
from fleetlight.roles.role import (
    Endpoint,
    Kind,
    Role,
    endpoint_text,
    parse_endpoint,
    parse_endpoints,
)

NAME = "PADDLE_*"


def _read(v: Variables) -> Role:
    servers = parse_endpoints(
        v.get("PADDLE_PSERVERS_IP_PORT_LIST") or "", "PADDLE_PSERVERS_IP_PORT_LIST"
    )
    workers = parse_endpoints(v.get("PADDLE_TRAINER_ENDPOINTS") or "", "PADDLE_TRAINER_ENDPOINTS")
    worker_num = _worker_num(v, workers)
    if _kind(v) is Kind.SERVER:
        return Role(
            kind=Kind.SERVER,
            dialect=NAME,
            index=_server_index(v, servers),
            worker_num=worker_num,
            server_num=len(servers),
            server_endpoints=servers,
            worker_endpoints=workers,
            master=workers[0] if workers else None,
            address=v.get("POD_IP"),
        )
    return _worker(v, workers, worker_num, servers)


def _worker(
    v: Variables, workers: tuple[Endpoint, ...], worker_num: int, servers: tuple[Endpoint, ...]
) -> Role:
    index = v.number("PADDLE_TRAINER_ID")
    if worker_num > 1 and not workers and not servers:
        raise RoleError(
            f"{NAME}: PADDLE_TRAINER_ENDPOINTS is not set, but {worker_num} workers must meet"
        )
    role = Role(
        dialect=NAME,
        index=index,
        worker_num=worker_num,
        server_num=len(servers),
        worker_endpoints=workers,
        server_endpoints=servers,
        master=workers[0] if workers else None,
        address=v.get("POD_IP"),
        device=v.first_device(),
    )
    if workers:
        _check_current(v, workers[index], index)
    return role.with_host_ranks()


def _kind(v: Variables) -> Kind:
    text = v.get("TRAINING_ROLE") or "TRAINER"
    kinds = {"TRAINER": Kind.WORKER, "PSERVER": Kind.SERVER}
    if text.upper() not in kinds:
        raise RoleError(f"{NAME}: TRAINING_ROLE={text!r}, expected TRAINER or PSERVER")
    return kinds[text.upper()]


def _worker_num(v: Variables, workers: tuple[Endpoint, ...]) -> int:
    said = v.number_or("PADDLE_TRAINERS_NUM", None)
    if said is None and not workers:
        return v.number("PADDLE_TRAINERS_NUM")
    if said is not None and workers and said != len(workers):
        raise RoleError(
            f"{NAME}: PADDLE_TRAINERS_NUM={said}, but PADDLE_TRAINER_ENDPOINTS "
            f"lists {len(workers)} endpoints"
        )
    return said if said is not None else len(workers)


def _server_index(v: Variables, servers: tuple[Endpoint, ...]) -> int:
    v.text("PADDLE_PSERVERS_IP_PORT_LIST")
    mine = v.endpoint("POD_IP", "PADDLE_PORT")
    if mine not in servers:
        raise RoleError(
            f"{NAME}: this server is {endpoint_text(mine)} (POD_IP:PADDLE_PORT), which is not in "
            f"PADDLE_PSERVERS_IP_PORT_LIST={v.get('PADDLE_PSERVERS_IP_PORT_LIST')!r}"
        )
    return servers.index(mine)


def _check_current(v: Variables, mine: Endpoint, index: int) -> None:
    current = v.get("PADDLE_CURRENT_ENDPOINT")
    if current and parse_endpoint(current, "PADDLE_CURRENT_ENDPOINT") != mine:
        raise RoleError(
            f"{NAME}: PADDLE_CURRENT_ENDPOINT={current}, but PADDLE_TRAINER_ID={index} is "
            f"{endpoint_text(mine)} in PADDLE_TRAINER_ENDPOINTS"
        )


DIALECT = Dialect(
    name=NAME,
    precedence=2,
    reader=_read,
    # many Kubernetes pods of other jobs set POD_IP and PADDLE_PORT
    marks=(
        "PADDLE_TRAINER_ID",
        "PADDLE_TRAINERS_NUM",
        "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_PSERVERS_IP_PORT_LIST",
        "TRAINING_ROLE",
    ),
    kept_from_children=r"TRAINING_ROLE|POD_IP|PADDLE_.*",
)
