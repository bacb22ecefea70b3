# SPDX-License-Identifier: Apache-2.0
"""Find the dialect of the environment and read this process's role."""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import re
from collections.abc import Collection, Sequence

from fleetlight.errors import RoleError
from fleetlight.roles import dialects
from fleetlight.roles.dialect import Dialect, Environment, Variables
from fleetlight.roles.role import Kind, Role, parse_endpoint
from fleetlight.roles.secret import parse_token

#: values of FLEET_LOG_LEVEL
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
#: the value of FLEET_RESUME that resumes only where something is saved
_AUTO = "auto"


def find_dialects() -> tuple[Dialect, ...]:
    """All dialects of the package in order of precedence."""
    names = [
        f"{dialects.__name__}.{module.name}" for module in pkgutil.iter_modules(dialects.__path__)
    ]
    found: list[Dialect] = [importlib.import_module(name).DIALECT for name in names]
    return tuple(sorted(found, key=lambda dialect: dialect.precedence))


DIALECTS = find_dialects()


def from_environment(env: Environment | None = None, known: Sequence[Dialect] = DIALECTS) -> Role:
    """This process's role; without a dialect, that of a single process."""
    env = os.environ if env is None else env
    joining = _joining(Variables(env, "FLEET_*"))
    if joining is not None:
        return with_fleet_variables(joining, env)
    present = [dialect for dialect in known if dialect.is_present(env)]
    stated = [dialect for dialect in present if not dialect.is_fallback]
    role = _agreed(stated or present[:1], env) if present else Role()
    role.check_host()
    return with_fleet_variables(role, env)


def is_kept_from_children(name: str, known: Sequence[Dialect] = DIALECTS) -> bool:
    """True if a variable describes the role of fleetrun itself and must not reach children."""
    return any(re.fullmatch(dialect.kept_from_children, name) for dialect in known)


def _agreed(present: Sequence[Dialect], env: Environment) -> Role:
    """The first dialect's role, checked against the other dialects."""
    first = present[0].read(env)
    for other in present[1:]:
        second = other.read(env)
        clash = _clash(first, second, other.unstated)
        if clash is not None:
            raise RoleError(
                f"two dialects disagree: {first.dialect} has {_fact(first, clash)}, "
                f"{second.dialect} has {_fact(second, clash)}; "
                "unset the variables of the dialect that does not belong to this job"
            )
    return first


def _clash(first: Role, second: Role, unsaid: Collection[str]) -> str | None:
    """The first fact that both roles state, with different values."""
    for fact in ("kind", "worker_num", "server_num", "index"):
        mine, theirs = getattr(first, fact), getattr(second, fact)
        if fact not in unsaid and None not in (mine, theirs) and mine != theirs:
            return fact
    return None


def _fact(role: Role, name: str) -> str:
    value = getattr(role, name)
    return f"{name}={value.value if isinstance(value, Kind) else value}"


def error_file() -> str | None:
    """The launcher's status file, available before the role is known."""
    return os.environ.get("FLEET_ERROR_FILE")


def with_fleet_variables(role: Role, env: Environment | None = None) -> Role:
    """The role with the `FLEET_*` settings that apply in every dialect."""
    v = Variables(os.environ if env is None else env, "FLEET_*")
    seconds = v.seconds_or("FLEET_DEADLINE_S", None)
    if seconds is not None:
        role = role.replace(deadline_s=seconds, deadline_variable="FLEET_DEADLINE_S")
    token = v.get("FLEET_TOKEN")
    return role.replace(
        address=v.get("FLEET_HOST") or role.address,
        error_file=v.get("FLEET_ERROR_FILE"),
        log_dir=v.get("FLEET_LOG_DIR"),
        job=v.get("FLEET_JOB") or role.job,
        restart=v.number_or("FLEET_RESTART", role.restart) or 0,
        **_resume(v),
        max_restarts=v.number_or("FLEET_MAX_RESTARTS", None),
        worker_max=v.number_or("FLEET_WORKER_MAX", None) if role.join is None else None,
        log_level=_log_level(v),
        token=None if token is None else parse_token(token, "FLEET_TOKEN"),
    )


def output_variables(env: Environment | None = None) -> dict[str, str]:
    """The variables by which users ask for colours, or for none."""
    env = os.environ if env is None else env
    return {name: env[name] for name in ("NO_COLOR", "FORCE_COLOR", "TERM") if name in env}


def _log_level(v: Variables) -> int:
    name = (v.get("FLEET_LOG_LEVEL") or "info").lower()
    if name not in _LEVELS:
        raise RoleError(f"FLEET_LOG_LEVEL={name}: expected one of {', '.join(_LEVELS)}")
    return _LEVELS[name]


def _joining(v: Variables) -> Role | None:
    """The role of a worker that joins a running job, which knows everything else."""
    join = v.get("FLEET_JOIN")
    if join is None:
        return None
    kind = (v.get("FLEET_ROLE") or Kind.WORKER.value).lower()
    if kind != Kind.WORKER.value:
        raise RoleError(
            f"FLEET_JOIN={join}, but FLEET_ROLE={kind}: only workers join a running job; unset one "
            "of the two"
        )
    return Role(
        dialect="FLEET_JOIN",
        index=None,
        join=parse_endpoint(join, "FLEET_JOIN"),
        local_rank=v.number_or("FLEET_LOCAL_RANK", None),
        device=v.number_or("FLEET_DEVICE", None),
    )


def _resume(v: Variables) -> dict[str, bool]:
    """Whether the job resumes an earlier one, and whether it may begin where there is none."""
    may_begin = (v.get("FLEET_RESUME") or "").lower() == _AUTO
    is_asked = may_begin or bool(v.number_or("FLEET_RESUME", 0))
    return {"resume": is_asked, "may_begin": may_begin}
