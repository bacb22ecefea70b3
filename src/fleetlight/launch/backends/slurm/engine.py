# SPDX-License-Identifier: Apache-2.0
"""`SlurmEngine`: submits jobs to Slurm, and asks it for them."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fleetlight.errors import ConfigError, LaunchError
from fleetlight.launch.backends import MemberState
from fleetlight.launch.backends.slurm.layout import JobStart, last_start
from fleetlight.launch.backends.slurm.script import batch_script, counts_of, member_log, rescaled
from fleetlight.launch.job.environment import inherited, secret
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.job.token import VARIABLE
from fleetlight.launch.screen import Prefixed

_LIMIT_S = 120.0
#: what commands say on a machine without a configuration of Slurm
_NO_CLUSTER = "Could not establish a configuration source"
#: what commands put before their messages, such as `sbatch: error: `
_PREFIX = re.compile(r"^(\w+: )?((error|fatal): )?(Batch job submission failed: )?")
#: `Key=value` of scontrol, where values may have spaces
_KEY = re.compile(r"(?:^|\s)([A-Z][\w/:.]*)=")


def ask(*words: str, given: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints; ConfigError with its message if it refuses."""
    try:
        done = subprocess.run(
            words,
            input=given,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} not found: run this on a login node of the cluster, or install Slurm's "
            "commands here; fleetrun --print shows the batch script without them"
        ) from None
    except subprocess.TimeoutExpired as error:
        # a command that tries again, such as sbatch while the queue is full, says so
        said = one_line(
            (error.stderr or b"").decode(errors="replace"), otherwise="see scontrol ping"
        )
        raise LaunchError(f"{words[0]} did not reply within {_LIMIT_S:g} s: {said}") from None
    if done.returncode:
        raise ConfigError(refusal(words, one_line(done.stderr)))
    return done.stdout


def refusal(words: Sequence[str], why: str) -> str:
    """Why a command of Slurm refuses."""
    if _NO_CLUSTER in why:
        return (
            f"{words[0]} finds no Slurm cluster: this machine belongs to none; run this on a login "
            "node of the cluster"
        )
    return f"Slurm refuses {' '.join(words[:2])}: {why}"


def one_line(text: str, otherwise: str = "it gave no reason") -> str:
    """The messages of a command as one line, each once; `otherwise` if there are none."""
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines)) or otherwise


def facts_of_job(job_id: str) -> dict[str, str]:
    """What `scontrol` knows of a job."""
    text = ask("scontrol", "--oneliner", "show", "job", job_id)
    parts = _KEY.split(text.strip())[1:]
    return {key: value.strip() for key, value in zip(parts[::2], parts[1::2], strict=True)}


#: states in which processes of the job may run
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED")
#: states of a job that may still start
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED")


class SlurmEngine:
    """Runs each job as one batch job with one step."""

    def emit(self, job: JobSpec) -> str:
        """The batch script."""
        return batch_script(job)

    def submit(self, job: JobSpec) -> str:
        """Submit the script; the token is only in the environment."""
        script = batch_script(job)
        # Slurm ends a job silently whose folder for output does not exist
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
        token = secret(job) or ({VARIABLE: secrets.token_hex(32)} if job.server.count else {})
        return _submitted(script, token)

    def status(self, job_id: str) -> Sequence[MemberState]:
        """A row for each process: by the last start of the job, else by its script."""
        job = _facts(job_id)
        state, detail = job["JobState"], _detail(job)
        start = None if state in _WAITING else _last_start(job)
        if start is None:
            servers, workers = counts_of(_script(job_id))
            names = [f"server {n}" for n in range(servers)] + [
                f"worker {n}" for n in range(workers)
            ]
            return [
                MemberState(name, state, detail=detail, is_over=_is_over(state)) for name in names
            ]
        hosts = ask("scontrol", "show", "hostnames", start.nodes).split()
        rows = [
            MemberState(
                f"{place.kind.value} {place.index}",
                "FAILED" if task in start.ends else state,
                hosts[place.node_rank],
                start.ends.get(task, detail),
                _is_over(state),
            )
            for task, place in enumerate(start.places)
        ]
        return sorted(rows, key=lambda row: row.name.split()[0])

    def logs(self, job_id: str, member: str | None, start: int = 0) -> Iterator[bytes]:
        """The logs of all processes, each line after a prefix, or that of one process."""
        job = _facts(job_id)
        output = job["StdOut"]
        names = _tasks_by_name(job)
        if member is not None:
            if member not in names:
                raise ConfigError(
                    f"{member!r} is no process of the job that has started; expected one of "
                    f"{', '.join(names) or 'none so far'}"
                )
            yield _read(member_log(output, names[member]))[start:]
            return
        for name, file in {
            **{name: member_log(output, task) for name, task in names.items()},
            "slurm": output,
        }.items():
            shown: list[bytes] = []
            lines = Prefixed(name, shown.append)
            lines(_read(file))
            lines.finish()
            yield from shown

    def stop(self, job_id: str) -> None:
        """Ask the processes to save and end, and Slurm not to start the job again."""
        state = _facts(job_id)["JobState"]
        if state in _WAITING:
            ask("scancel", job_id)
        elif state in _RUNNING:
            ask("scontrol", "update", f"JobId={job_id}", "Requeue=0")
            ask("scancel", "--signal=TERM", job_id)
        else:
            raise ConfigError(f"job {job_id} has ended: {state}")

    def scale(self, job_id: str, counts: Mapping[str, int]) -> str:
        """Stop the job, and submit it with other counts; it resumes after the end of the first."""
        state = _facts(job_id)["JobState"]
        if _is_over(state):
            raise ConfigError(f"job {job_id} has ended: {state}; start a new one with --resume")
        script = rescaled(_script(job_id), counts)
        token = {VARIABLE: secrets.token_hex(32)} if counts_of(script)[0] else {}
        new_id = _submitted(script, token, f"--dependency=afterany:{job_id}")
        self.stop(job_id)
        return new_id


def _is_over(state: str) -> bool:
    return state not in (*_WAITING, *_RUNNING)


def _submitted(script: str, token: Mapping[str, str], *more: str) -> str:
    # variables of another job would contradict those of this one
    environment = {**inherited(os.environ), **token}
    printed = ask("sbatch", "--parsable", *more, given=script, environment=environment)
    return printed.strip().partition(";")[0]


def _facts(job_id: str) -> dict[str, str]:
    if not re.fullmatch(r"\d+", job_id):
        raise ConfigError(
            f"got the job {job_id!r}, expected the number that Slurm gave, as in 1234"
        )
    return facts_of_job(job_id)


def _script(job_id: str) -> str:
    return ask("scontrol", "write", "batch_script", job_id, "-")


def _detail(job: Mapping[str, str]) -> str:
    """Why a job waits or how it ended, and how often it was started again."""
    reason, code, restarts = job.get("Reason"), job.get("ExitCode", "0:0"), job.get("Restarts")
    exit_code, _, signal = code.partition(":")
    parts = [
        reason if reason not in (None, "None") else "",
        f"exit code {exit_code}" if exit_code != "0" else "",
        f"signal {signal}" if signal not in ("0", "") else "",
        f"restarts: {restarts}" if restarts not in (None, "0") else "",
    ]
    return ", ".join(part for part in parts if part)


def _last_start(job: Mapping[str, str]) -> JobStart | None:
    return last_start(_read(job["StdOut"]).decode(errors="replace"))


def _tasks_by_name(job: Mapping[str, str]) -> dict[str, int]:
    start = _last_start(job)
    places = [] if start is None else start.places
    names = {f"{place.kind.value} {place.index}": task for task, place in enumerate(places)}
    return dict(sorted(names.items(), key=lambda item: item[0].split()[0]))


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; run this where the log folder of the job is"
        ) from None
