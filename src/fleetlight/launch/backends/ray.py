# SPDX-License-Identifier: Apache-2.0
"""Ray: `fleetrun --on ray` submits a Ray job, whose driver is `fleetlight.ray`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fleetlight.errors import ConfigError, LaunchError, did_you_mean
from fleetlight.launch.backends import MemberState, on_engine
from fleetlight.launch.job.spec import JobSpec, RoleSpec

#: the options of the section, and their defaults
_OPTIONS = {"address": "", "working_dir": ".", "python": "python"}
#: where Ray's dashboard listens on the machine of its head
_ADDRESS = "http://127.0.0.1:8265"
#: how much longer than a save the driver may take to end
_MARGIN_S = 10
_POLL_S = 0.5


class RayEngine:
    """Submits, asks and stops jobs through Ray's job server."""

    def emit(self, job: JobSpec) -> str:
        """The Ray job as JSON."""
        return json.dumps(_submission(job, f"{job.name}-<random>"), indent=2) + "\n"

    def submit(self, job: JobSpec) -> str:
        """Submit the Ray job; returns the id that it has there."""
        client = _client(_options(job)["address"])
        with _refusals():
            return str(client.submit_job(**_submission(job, f"{job.name}-{secrets.token_hex(4)}")))

    def status(self, job_id: str) -> Sequence[MemberState]:
        """The driver, and the actor of each process."""
        client = _client()
        with _refusals():
            info = client.get_job_info(job_id)
            actors = _actors(client, job_id)
        is_over = info.status.is_terminal()
        driver = MemberState("driver", str(info.status), "", info.message or "", is_over)
        return [driver, *(dataclasses.replace(one, is_over=is_over) for one in actors)]

    def logs(self, job_id: str, member: str | None, start: int = 0) -> Iterator[bytes]:
        """The output of the driver, to which Ray adds that of the actors, each line prefixed."""
        client = _client()
        with _refusals():
            text = client.get_job_logs(job_id)
        # Ray colours the prefix
        prefix = re.compile(rf"(\x1b\[\d+m)*\({re.escape(member or '')} ")
        found = (
            line.encode()
            for line in text.splitlines(keepends=True)
            if member is None or prefix.match(line)
        )
        yield b"".join(found)[start:]

    def stop(self, job_id: str) -> None:
        """Ask the driver to end; it ends the processes, which save first."""
        client = _client()
        with _refusals():
            client.stop_job(job_id)

    def scale(self, job_id: str, counts: Mapping[str, int]) -> str:
        """Stop the job, and resume it with other counts."""
        client = _client()
        with _refusals():
            info = client.get_job_info(job_id)
        job = spec_from_json(shlex.split(info.entrypoint)[-1].encode())
        _refuse_unscalable(job, job_id, counts)
        self.stop(job_id)
        _wait_for_end(client, job_id, job.stop_s + _MARGIN_S)
        roles = {role: _counted(getattr(job, role), count) for role, count in counts.items()}
        return self.submit(dataclasses.replace(job, resume=True, **roles))  # type: ignore[arg-type]


def _submission(job: JobSpec, job_id: str) -> dict[str, Any]:
    """The arguments of Ray's `submit_job`."""
    if job.token is not None:
        raise ConfigError(
            "--on ray: the driver makes the token of the job itself; omit --token_file and unset "
            "FLEET_TOKEN"
        )
    if job.worker_max is not None or job.join is not None:
        raise ConfigError(
            "--on ray: workers cannot join a running job there, since its driver keeps the token; "
            "omit --worker_max and --join, or change the counts with fleetlight scale"
        )
    options = _options(job)
    command = [options["python"], "-m", "fleetlight.ray", spec_to_json(job).decode()]
    return {
        "entrypoint": shlex.join(command),
        "submission_id": job_id,
        "runtime_env": {
            # `scale` may be called in another folder
            "working_dir": os.path.abspath(options["working_dir"]),
            "env_vars": {
                "FLEET_JOB": job_id,
                # Ray kills a driver that it stops after this time
                "RAY_JOB_STOP_WAIT_TIME_S": str(int(job.stop_s) + _MARGIN_S),
            },
        },
    }


def _options(job: JobSpec) -> dict[str, str]:
    for name in job.engine.options:
        if name not in _OPTIONS:
            raise ConfigError(f"--option {name}: {did_you_mean(name, sorted(_OPTIONS))}")
    return {**_OPTIONS, **job.engine.options}


def _client(address: str = "") -> Any:
    """A client of Ray's job server."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError(
            f"--on ray needs Ray's job client ({error}); install it with pip install "
            "'fleetlight[ray]'"
        ) from None
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or _ADDRESS
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise LaunchError(
            f"Ray's job server does not answer at {address}: {str(error).splitlines()[0]}; start "
            "Ray (ray start --head), or set RAY_API_SERVER_ADDRESS=http://HOST:8265"
        ) from None


class _refusals:
    """Turns Ray's errors into one line."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | ConnectionError) and not isinstance(error, LaunchError):
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise LaunchError(f"Ray refused: {lines[-1] if lines else error}") from None


def _actors(client: Any, job_id: str) -> list[MemberState]:
    from ray.util.state import list_actors

    found = list_actors(address=client.get_address(), detail=True, limit=10_000)
    mine = [one for one in found if (one.name or "").startswith(f"{job_id} ")]
    return [
        MemberState(one.name.removeprefix(f"{job_id} "), one.state, one.node_id or "")
        for one in sorted(mine, key=lambda one: str(one.name))
    ]


def _refuse_unscalable(job: JobSpec, job_id: str, counts: Mapping[str, int]) -> None:
    """Refuse to stop a job that could not resume with these counts."""
    if "server" in counts and not job.server.count:
        raise ConfigError("--server_num: this job has no parameter servers; start one that has")
    if job.checkpoint is None:
        raise ConfigError(
            f"ray:{job_id} has no checkpoint folder, so a job of other counts cannot resume it; "
            "start it with --checkpoint DIR"
        )


def _wait_for_end(client: Any, job_id: str, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not client.get_job_status(job_id).is_terminal():
        if time.monotonic() > end:
            raise LaunchError(
                f"Ray job {job_id} did not stop within {within_s:g} s; see fleetlight logs "
                f"ray:{job_id}"
            )
        time.sleep(_POLL_S)


def _counted(role: RoleSpec, count: int) -> RoleSpec:
    return dataclasses.replace(role, count=count)


def spec_to_json(job: JobSpec) -> bytes:
    """A job as JSON, without its token."""
    return msgspec.json.format(msgspec.json.encode(dataclasses.replace(job, token=None)))


def spec_from_json(data: bytes) -> JobSpec:
    """Inverse of `spec_to_json`."""
    return msgspec.json.decode(data, type=JobSpec, dec_hook=_no_secret)


def _no_secret(kind: type, value: object) -> object:
    raise ConfigError(f"a job in a file has no {kind.__name__}; give the token by FLEET_TOKEN")


BACKEND = on_engine("ray", RayEngine())
