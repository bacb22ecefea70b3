# SPDX-License-Identifier: Apache-2.0
"""The batch script of a job: an allocation, and one step with a task for each process. Pure."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping

from fleetlight.errors import ConfigError
from fleetlight.launch.backends.slurm.options import check_options
from fleetlight.launch.exit_codes import RESUME_CODE
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.job.token import VARIABLE
from fleetlight.roles.password import PASSWORD

#: how long before the time limit the job is asked to save; Slurm may ask 60 s earlier
_MIN_SIGNAL_S = 60
#: after a loss of a node or a requeue the job resumes from what it has saved
_RESUME_LATER = 'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then export FLEET_RESUME=auto; fi'
_RESUME_NOW = "export FLEET_RESUME=auto"
_TASKS, _SERVERS = "#SBATCH --ntasks=", "export FLEET_SERVER_NUM="
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*")


def batch_script(job: JobSpec) -> str:
    """The script that `sbatch` gets, without secrets."""
    check_options(job.engine.options)
    _check_variables(job.engine.variables)
    return "\n".join(
        ["#!/bin/bash", *_directives(job), "", *_exports(job), "", *_step(job), "", *_END, ""]
    )


def rescaled(script: str, counts: Mapping[str, int]) -> str:
    """The script of the same job with other counts, which resumes."""
    servers, workers = counts_of(script)
    if "server" in counts and not servers:
        raise ConfigError("--server_num: this job has no parameter servers; start one that has")
    servers, workers = counts.get("server", servers), counts.get("worker", workers)
    script = _replaced(script, _TASKS, servers + workers)
    if servers:
        script = _replaced(script, _SERVERS, servers)
    return script.replace(_RESUME_LATER, _RESUME_NOW)


def counts_of(script: str) -> tuple[int, int]:
    """The numbers of servers and workers in a script."""
    tasks, servers = _number(script, _TASKS), _number(script, _SERVERS) or 0
    if tasks is None:
        raise ConfigError("this job was not started by fleetrun --on slurm, which sets --ntasks")
    return servers, tasks - servers


def member_log(output: str, task: int) -> str:
    """The log of a task, by the file with the output of the batch script."""
    return f"{output.removesuffix('.out')}.task{task}.log"


def _number(script: str, start: str) -> int | None:
    found = re.search(rf"^{re.escape(start)}(\d+)$", script, re.MULTILINE)
    return None if found is None else int(found[1])


def _replaced(script: str, start: str, number: int) -> str:
    return re.sub(rf"^{re.escape(start)}\d+$", f"{start}{number}", script, flags=re.MULTILINE)


def _check_variables(variables: Mapping[str, str]) -> None:
    for name in variables:
        if not _VARIABLE_NAME.fullmatch(name):
            raise ConfigError(f"--env {name}: expected a name of letters, digits and _")
        if name in (VARIABLE, PASSWORD):
            raise ConfigError(
                f"--env {name}: the batch script is no place for a secret; set {name} in the "
                "environment of fleetrun"
            )


def _directives(job: JobSpec) -> Iterator[str]:
    roles = [role.resources for role in job.roles]
    cpus = max(resources.cpus for resources in roles)
    memory = max(resources.memory_mib or 0 for resources in roles)
    gpus = max(resources.gpus for resources in roles)
    yield f"#SBATCH --job-name={job.name}"
    yield f"{_TASKS}{job.processes}"
    yield f"#SBATCH --cpus-per-task={cpus}"
    if memory:
        yield f"#SBATCH --mem-per-cpu={math.ceil(memory / cpus)}M"
    if gpus:
        yield f"#SBATCH --gpus-per-task={gpus}"
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --signal=TERM@{max(_MIN_SIGNAL_S, math.ceil(job.stop_s))}"
    folder = os.path.abspath(job.log_dir).replace("%", "%%")
    yield f"#SBATCH --output={shlex.quote(f'{folder}/%x-%j.out')}"
    for name, value in job.engine.options.items():
        yield f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")


def _exports(job: JobSpec) -> Iterator[str]:
    if job.server.count:
        yield f"{_SERVERS}{job.server.count}"
    if job.processes == 1:
        # a step of one task is no job of its own, so Slurm's variables do not name it
        yield 'export FLEET_JOB="slurm-$SLURM_JOB_ID" FLEET_RESTART="${SLURM_RESTART_COUNT:-0}"'
    yield f"export FLEET_MAX_RESTARTS={job.max_restarts}"
    cpus = max(role.resources.cpus for role in job.roles)
    yield f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cpus}}}"'
    for name, value in {**job.environment, **job.engine.variables}.items():
        yield f"export {name}={shlex.quote(value)}"
    yield _RESUME_LATER


def _step(job: JobSpec) -> Iterator[str]:
    folder = shlex.quote(os.path.abspath(job.log_dir).replace("%", "%%"))
    member = [sys.executable, "-m", "fleetlight", "member", "--restarts", str(job.max_restarts)]
    # the pattern that `engine.py` reads
    yield (
        'echo "start ${SLURM_RESTART_COUNT:-0}: tasks $SLURM_TASKS_PER_NODE on '
        '$SLURM_JOB_NODELIST, servers ${FLEET_SERVER_NUM:-0} ${FLEET_SERVERS:-spread}"'
    )
    # srun does not read the cores of a task from the batch job
    yield 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --distribution=block \\'
    yield "  --kill-on-bad-exit=0 --open-mode=append \\"
    yield f'  --output={folder}/"$SLURM_JOB_NAME-$SLURM_JOB_ID.task%t.log" \\'
    yield f"  {shlex.join(member)} -- \\"
    yield f"  {shlex.join([sys.executable, *job.command])}"
    yield "code=$?"


#: `fleetlight stop` makes Slurm refuse the requeue
_END = (
    f'if [ "$code" = {RESUME_CODE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
    'exit "$code"',
)
