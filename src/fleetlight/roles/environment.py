# SPDX-License-Identifier: Apache-2.0
"""Finds out which dialect the environment speaks and reads this process's role from it."""

from __future__ import annotations

import os
from collections.abc import Collection
from types import ModuleType

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Environment, Variables
from fleetlight.roles.dialects import fleetrun, mindspore, paddle, slurm, torchrun
from fleetlight.roles.role import Kind, Role
from fleetlight.roles.secret import token_of

#: in order of precedence; Slurm speaks only when nobody else does
DIALECTS: tuple[ModuleType, ...] = (fleetrun, torchrun, paddle, mindspore)

#: torchrun has no word for servers, so its silence about them contradicts nobody
_CANNOT_SAY = {torchrun.NAME: ("server_num",)}


def from_environment(env: Environment | None = None) -> Role:
    """This process's role; a lone process when no dialect is present."""
    env = os.environ if env is None else env
    spoken = [dialect for dialect in DIALECTS if dialect.present(env)]
    if spoken:
        role = _agreed(spoken, env)
    elif slurm.present(env):
        role = slurm.read(env)
    else:
        role = Role()
    role.check_host()
    return with_common(role, env)


def _agreed(spoken: list[ModuleType], env: Environment) -> Role:
    """The first dialect's role, once all the others are seen to say the same."""
    first: Role = spoken[0].read(env)
    for other in spoken[1:]:
        second: Role = other.read(env)
        clash = _clash(first, second, _CANNOT_SAY.get(other.NAME, ()))
        if clash is not None:
            raise RoleError(
                f"two dialects disagree: {first.dialect} says {_fact(first, clash)}, "
                f"{second.dialect} says {_fact(second, clash)}; "
                "unset the variables of the one that does not belong to this job"
            )
    return first


def _clash(first: Role, second: Role, unsaid: Collection[str]) -> str | None:
    """The first fact that the two roles both state and state differently."""
    for fact in ("kind", "worker_num", "server_num", "index"):
        mine, theirs = getattr(first, fact), getattr(second, fact)
        if fact not in unsaid and None not in (mine, theirs) and mine != theirs:
            return fact
    return None


def _fact(role: Role, name: str) -> str:
    value = getattr(role, name)
    return f"{name}={value.value if isinstance(value, Kind) else value}"


def error_file() -> str | None:
    """Where the launcher looks for what went wrong; it is there before the role is known."""
    return os.environ.get("FLEET_ERROR_FILE")


def with_common(role: Role, env: Environment | None = None) -> Role:
    """The role with the settings of ours that hold in every dialect."""
    v = Variables(os.environ if env is None else env, fleetrun.NAME)
    seconds = v.seconds_or("FLEET_DEADLINE_S", None)
    if seconds is not None:
        role = role.replace(deadline_s=seconds, deadline_variable="FLEET_DEADLINE_S")
    token = v.get("FLEET_TOKEN")
    return role.replace(
        address=v.get("FLEET_HOST") or role.address,
        error_file=v.get("FLEET_ERROR_FILE"),
        job=v.get("FLEET_JOB") or "",
        resume=bool(v.number_or("FLEET_RESUME", 0)),
        max_restarts=v.number_or("FLEET_MAX_RESTARTS", None),
        token=None if token is None else token_of(token, "FLEET_TOKEN"),
    )
