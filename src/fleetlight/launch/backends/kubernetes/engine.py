# SPDX-License-Identifier: Apache-2.0
"""`Kubernetes`: submits jobs to a cluster, and asks it about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetlight.errors import ConfigError, FleetError, LaunchError
from fleetlight.launch.backends import MemberState
from fleetlight.launch.backends.kubernetes import secrets, states, text
from fleetlight.launch.backends.kubernetes.jobset import (
    check,
    jobset,
    journal_claim,
    objects,
    rescaled,
)
from fleetlight.launch.backends.kubernetes.kubectl import Kubectl
from fleetlight.launch.backends.kubernetes.pods import name_of, restarts_alone
from fleetlight.launch.backends.kubernetes.settings import TRAINER, read_settings
from fleetlight.launch.job.spec import JobSpec

#: how much longer than the grace period of its pods the end of a job may take
_END_S = 120


class Kubernetes:
    """The id of a job is the name of its JobSet, after the namespace and / if it has one."""

    def emit(self, job: JobSpec) -> str:
        """The objects as YAML; the secret without its values."""
        return text.dump(objects(job, read_settings(job.engine.options)))

    def submit(self, job: JobSpec) -> str:
        """Create the objects; the JobSet comes first, since it may be refused."""
        settings = read_settings(job.engine.options)
        if settings.runtime == TRAINER:
            raise ConfigError(
                "--option runtime=trainer describes a template, not a job: add --print, set the "
                "values of the secret, and pass the output to kubectl apply -f -"
            )
        check(job, settings)
        kubectl, name = Kubectl(settings.namespace), name_of(job)
        made = kubectl.create(jobset(job, settings))
        try:
            if restarts_alone(job, settings):
                kubectl.apply(journal_claim(job, settings))
            kubectl.create(secrets.secret(job, name, _owner(made)))
        except FleetError:
            kubectl.delete("jobset", name)
            raise
        return f"{settings.namespace}/{name}" if settings.namespace else name

    def status(self, job_id: str) -> Sequence[MemberState]:
        """The job itself, then its processes."""
        kubectl, name = _found(job_id)
        jobset = kubectl.get("jobset", name)
        pods = _pods(kubectl, name)
        job = states.job_state(jobset, pods, _warnings(kubectl, name))
        members = states.members(pods)
        return [job, *(dataclasses.replace(one, is_over=job.is_over) for one in members)]

    def logs(self, job_id: str, member: str | None, start: int = 0) -> Iterator[bytes]:
        """The output of each pod in turn, including those that were replaced."""
        kubectl, name = _found(job_id)
        pods = _pods(kubectl, name)
        if not pods:
            kubectl.get("jobset", name)
        chosen = [pod for pod in pods if member in (None, _name_of(pod))]
        if member is not None and not chosen:
            known = ", ".join(dict.fromkeys(map(_name_of, pods))) or "none yet"
            raise ConfigError(f"got the process {member!r}, expected one of the job's: {known}")
        for pod in chosen:
            try:
                printed = kubectl.logs(pod["metadata"]["name"])
            except LaunchError as error:
                if member is not None:
                    raise
                # one that waits for its image has printed nothing
                printed = f"{error}\n".encode()
            if member is None:
                yield _headed(printed, _name_of(pod))
                continue
            yield printed[start:]
            start = max(0, start - len(printed))

    def stop(self, job_id: str) -> None:
        """Delete the JobSet; its pods get SIGTERM, and the time that they need to save."""
        kubectl, name = _found(job_id)
        kubectl.delete("jobset", name)

    def scale(self, job_id: str, counts: Mapping[str, int]) -> str:
        """End the job with a save, and start it again with other counts."""
        kubectl, name = _found(job_id)
        found = kubectl.get("jobset", name)
        again = rescaled(found, counts)
        _refuse_unsaved(found, job_id)
        secret = kubectl.get("secret", name)
        kubectl.delete("jobset", name, wait_s=_grace_s(found) + _END_S)
        made = kubectl.create(again)
        kubectl.create(secrets.copied(secret, _owner(made)))
        return job_id


def _found(job_id: str) -> tuple[Kubectl, str]:
    namespace, _, name = job_id.rpartition("/")
    return Kubectl(namespace), name


def _owner(made: Mapping[str, Any]) -> dict[str, Any]:
    """The secret ends with its JobSet."""
    head = made["metadata"]
    return {
        "apiVersion": made["apiVersion"],
        "kind": "JobSet",
        "name": head["name"],
        "uid": head["uid"],
    }


def _pods(kubectl: Kubectl, name: str) -> list[Mapping[str, Any]]:
    found = kubectl.get("pods", "--selector", f"jobset.sigs.k8s.io/jobset-name={name}")
    return states.in_order(found["items"])


def _warnings(kubectl: Kubectl, name: str) -> list[Mapping[str, Any]]:
    """Warnings about the JobSet and its Jobs, such as a quota that is used up."""
    found = kubectl.get("events", "--field-selector", "type=Warning")["items"]
    about = [(event, event.get("involvedObject", {})) for event in found]
    return [
        event
        for event, it in about
        if it.get("kind") in ("Job", "JobSet")
        and (it.get("name") == name or it.get("name", "").startswith(f"{name}-"))
    ]


def _name_of(pod: Mapping[str, Any]) -> str:
    role, index = states.member_of(pod)
    return f"{role} {index}"


def _headed(printed: bytes, name: str) -> bytes:
    return b"".join(f"[{name}] ".encode() + line for line in printed.splitlines(keepends=True))


def _containers(jobset: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for one in jobset["spec"]["replicatedJobs"]:
        yield from one["template"]["spec"]["template"]["spec"]["containers"]


def _refuse_unsaved(jobset: Mapping[str, Any], job_id: str) -> None:
    names = {entry["name"] for one in _containers(jobset) for entry in one["env"]}
    if "FLEET_CHECKPOINT" not in names:
        raise ConfigError(
            f"kubernetes:{job_id} has no checkpoint folder, so a job of other counts cannot resume "
            "it; start it with --checkpoint NAME --option checkpoint_claim=CLAIM"
        )


def _grace_s(jobset: Mapping[str, Any]) -> int:
    """The longest grace period of its pods."""
    pods = [one["template"]["spec"]["template"]["spec"] for one in jobset["spec"]["replicatedJobs"]]
    return max(int(pod.get("terminationGracePeriodSeconds", 30)) for pod in pods)
