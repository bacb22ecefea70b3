# SPDX-License-Identifier: Apache-2.0
"""The page of environment variables: those that the code reads, and those that it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fleetlight
from fleetlight.roles.unsupported import UNSUPPORTED
from fleetlight.strategy import DistributedStrategy
from fleetlight.strategy.strategy import variables_of

_PACKAGE = Path(fleetlight.__path__[0])
#: names of variables that Fleetlight defines
_OWN = re.compile(r"FLEET_[A-Z_]+[A-Z]")
#: a variable of a dialect: capital letters, at least one underscore, or RANK
_DIALECT = re.compile(r"RANK|(?:[A-Z0-9]+|FLAGS)(?:_[A-Za-z0-9]+)+")
#: texts of dialects that are no variables
_VALUES = {"MS_SCHED", "MS_WORKER", "MS_PSERVER"}

#: what each own variable is for
MEANINGS = {
    "FLEET_CHECKPOINT": "The folder of automatic checkpoints. `fleetrun --checkpoint` sets it.",
    "FLEET_DEADLINE_S": "The longest wait for a peer, in seconds. `fleetrun --deadline_s` sets it.",
    "FLEET_DEVICE": "The index of this worker's GPU. `fleetrun --gpus` sets it.",
    "FLEET_ERROR_FILE": "The file in which the process reports its status to `fleetrun`.",
    "FLEET_HOST": "The address of this machine, where the detected one is wrong.",
    "FLEET_INDEX": "The index of this process among those of its role.",
    "FLEET_JOB": "A name of the job, which its processes keep after a restart.",
    "FLEET_JOIN": "`host:port` of server 0, or the scheduler, of the job that this worker joins.",
    "FLEET_LOCAL_RANK": "The index of this process on its host.",
    "FLEET_LOCAL_SIZE": "How many processes of its role the host has.",
    "FLEET_LOG_DIR": "The folder of logs. `fleetrun --log_dir` sets it.",
    "FLEET_LOG_LEVEL": "What processes log: `debug`, `info` or `warning`. `fleetrun -v` sets it.",
    "FLEET_MASTER": "`host:port` where the job forms.",
    "FLEET_MAX_RESTARTS": "How many restarts are allowed; 0 keeps nothing for a next incarnation.",
    "FLEET_NODE_NUM": "How many hosts the job has.",
    "FLEET_NODE_RANK": "The index of this host.",
    "FLEET_RESTART": "How often the launcher has restarted the job.",
    "FLEET_RESUME": "`1`: resume what an earlier job left; `auto`: or begin if nothing is saved.",
    "FLEET_ROLE": "`worker`, `server` or `scheduler`.",
    "FLEET_SCHEDULER_NUM": "1 if a process with the role `scheduler` listens at `FLEET_MASTER`.",
    "FLEET_SERVERS": "In Slurm: which tasks are servers, `spread` or `pack` (the first).",
    "FLEET_SERVER_ENDPOINTS": "`host:port` of each server, separated by commas.",
    "FLEET_SERVER_NUM": "How many servers the job has.",
    "FLEET_SINKS": "Services that get the metrics of the job. `fleetrun --sinks` sets it.",
    "FLEET_SSL": "The folder of certificates. `fleetrun --ssl` sets it.",
    "FLEET_SSL_EXPIRY_WARNING_DAYS": "Days before it expires that a certificate causes a warning.",
    "FLEET_SSL_PASSWORD": "The password of encrypted keys.",
    "FLEET_SSL_PASSWORD_FILE": "A file with the password of encrypted keys.",
    "FLEET_TEMPLATE": "Set by `fleetrun` in the process that loads torch once for all others.",
    "FLEET_TERMINATION_LOG": "The file into which a process that fails writes the reason as JSON.",
    "FLEET_TOKEN": "The secret of the job: processes without it are refused.",
    "FLEET_WORKER_ENDPOINTS": "`host:port` of each worker, separated by commas.",
    "FLEET_WORKER_MAX": "How many workers a job with servers may have while it runs.",
    "FLEET_WORKER_NUM": "How many workers the job has.",
}
_DIALECTS = {
    "torchrun": "torchrun, and what imitates it",
    "paddle": "PaddlePaddle",
    "mindspore": "MindSpore",
    "slurm": "Slurm",
}
_ABOUT = """\
# Environment variables

Every variable that Fleetlight reads or names, from the code. [Roles](../roles.md) says which a
process needs that you start by hand.

## Fleetlight's own

`fleetrun` sets those of roles. Set the others yourself, or by the flag that the line names."""


def variables_page() -> dict[str, str]:
    """The page by its path below docs/."""
    parts = [_ABOUT, _listed(dict(sorted(MEANINGS.items())))]
    parts += ["## Defaults of settings", "A value of the script takes precedence."]
    parts.append(
        "\n".join(
            f"- `{variable}`: [`{field}`](settings.md#{field.split('.')[0].lower()})"
            for variable, field in sorted(variables_of(DistributedStrategy).items())
        )
    )
    parts += ["## Of other launchers", "Their meanings are on the page about [roles](../roles.md)."]
    parts += ["\n".join(_dialects())]
    parts += [
        "## Of other systems",
        "Fleetlight does not read these. If one is set, worker 0 names it at `fleet.init`, with "
        "this advice:",
        _listed({_shown(name): f"{text}." for name, text in UNSUPPORTED.items()}),
    ]
    return {"reference/variables.md": "\n\n".join(parts) + "\n"}


def own_variables() -> set[str]:
    """The variables of Fleetlight that the code names."""
    paths = sorted(_PACKAGE.rglob("*.py"))
    return {text for path in paths for text in _texts(path) if _OWN.fullmatch(text)}


def _dialects() -> Iterator[str]:
    for name, system in _DIALECTS.items():
        path = _PACKAGE / "roles" / "dialects" / f"{name}.py"
        found = {text for text in _texts(path) if _DIALECT.fullmatch(text)}
        shown = sorted(found - _VALUES - MEANINGS.keys())
        yield f"- {system}: {', '.join(f'`{one}`' for one in shown)}"


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _listed(meanings: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {text}" for name, text in meanings.items())


def _shown(pattern: str) -> str:
    """A pattern of names as a reader writes it."""
    return pattern.replace(".*", "*").replace("(", "{").replace(")", "}").replace("|", ",")
