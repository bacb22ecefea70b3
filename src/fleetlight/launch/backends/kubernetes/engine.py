# SPDX-License-Identifier: Apache-2.0
"""`Kubernetes`: submits jobs to a cluster, and asks it about them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetlight.errors import ConfigError, FleetError, LaunchError
from fleetlight.launch import exit_codes
from fleetlight.launch.backends import MemberState
from fleetlight.launch.backends.kubernetes import secrets, states, text
from fleetlight.launch.backends.kubernetes.kubectl import Kubectl
from fleetlight.launch.backends.kubernetes.pods import (
    Object,
    claim_of,
    container_name,
    job_name,
    journal_folder,
    name_of,
    pod_template,
    restarts_alone,
    saves_on_claim,
)
from fleetlight.launch.backends.kubernetes.secrets import placeholder
from fleetlight.launch.backends.kubernetes.settings import TRAINER, ClusterSettings, read_settings
from fleetlight.launch.job.spec import JobSpec, RoleSpec
from fleetlight.roles.role import Kind

#: the exit codes of a process that would fail again
_PERMANENT = (exit_codes.PERMANENT, exit_codes.NOT_EXECUTABLE, exit_codes.NOT_FOUND)
#: 128 and a signal that ends a process from outside, or that a fault in native code causes
_KILLED = (132, 134, 135, 136, 137, 139, 143)


def objects(job: JobSpec, settings: ClusterSettings) -> list[Object]:
    """All objects of the job, in the order in which they may be created; without secrets."""
    check(job, settings)
    name = name_of(job)
    claims = [journal_claim(job, settings)] if restarts_alone(job, settings) else []
    main = training_runtime if settings.runtime == TRAINER else jobset
    return [*claims, placeholder(job, name, settings.namespace), main(job, settings)]


def check(job: JobSpec, settings: ClusterSettings) -> None:
    """Refuse a job that would lose what it saves."""
    if saves_on_claim(job) and not settings.checkpoint_claim:
        raise ConfigError(
            f"--checkpoint {job.checkpoint}: the files of a pod end with it; pass --option "
            "checkpoint_claim=NAME, a claim that all pods may write to, or save under a URL"
        )
    if settings.checkpoint_claim and not saves_on_claim(job):
        raise ConfigError(
            f"--option checkpoint_claim={settings.checkpoint_claim} is for a job that saves; pass "
            "--checkpoint NAME, the folder on the claim, or omit it"
        )
    if settings.journal_size and not job.server.count:
        raise ConfigError(
            "--option journal_size is for the logs of a job with parameter servers "
            "(strategy.durability); a collective job saves with --checkpoint"
        )


def jobset(job: JobSpec, settings: ClusterSettings) -> Object:
    """The JobSet."""
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    queue = {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}
    labels = {"app.kubernetes.io/managed-by": "fleetlight", **queue}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name_of(job), **namespace, "labels": labels},
        "spec": jobset_spec(job, settings),
    }


def jobset_spec(job: JobSpec, settings: ClusterSettings) -> Object:
    """What the JobSet runs, when it has succeeded, and what happens after a failure."""
    ttl = {} if settings.ttl is None else {"ttlSecondsAfterFinished": settings.ttl}
    return {
        # pods look for each other before they are ready
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {
            "operator": "All",
            "targetReplicatedJobs": [job_name(Kind.WORKER, settings)],
        },
        "failurePolicy": {
            "maxRestarts": job.max_restarts,
            # a server that still runs holds the lock of its journal
            "restartStrategy": "BlockingRecreate",
            "rules": _failure_rules(),
        },
        **ttl,
        "replicatedJobs": [_replicated(job, role, settings) for role in job.roles],
    }


def _failure_rules() -> list[Object]:
    """What a failed Job means, by the message that Kubernetes writes for a rule of its pods."""
    codes = "|".join(map(str, _PERMANENT))
    rules = {
        "permanentError": ("FailJobSet", f"exit code ({codes}) matching"),
        # its processes have saved, and a restart resumes
        "stopped": (
            "RestartJobSetAndIgnoreMaxRestarts",
            f"exit code {exit_codes.RESUME_CODE} matching",
        ),
        "disrupted": ("RestartJobSetAndIgnoreMaxRestarts", "condition DisruptionTarget matching"),
    }
    return [
        {
            "name": name,
            "action": action,
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [pattern],
        }
        for name, (action, pattern) in rules.items()
    ]


def _replicated(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> Object:
    name = job_name(role.kind, settings)
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    is_trainers = settings.runtime == TRAINER and role.kind is Kind.WORKER
    return {
        "name": name,
        "replicas": 1,
        "template": {
            **({"metadata": {"labels": step}} if is_trainers else {}),
            "spec": {
                "completionMode": "Indexed",
                "completions": role.count,
                "parallelism": role.count,
                **_retries(job, role, settings),
                "podFailurePolicy": {"rules": _pod_failure_rules(job, settings)},
                "template": pod_template(job, role, settings),
            },
        },
    }


def _retries(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> Object:
    """How often pods are replaced; a Job fails with the first index that has no restarts left."""
    if restarts_alone(job, settings):
        return {"backoffLimitPerIndex": job.max_restarts, "maxFailedIndexes": 0}
    # all but the process that failed may end with it; the rule for its own code decides
    return {"backoffLimit": role.count - 1}


def _pod_failure_rules(job: JobSpec, settings: ClusterSettings) -> list[Object]:
    """The rules for a failed pod; the first that matches counts.

    A process that failed only because of a peer matches none, so that the peer's code decides.
    """
    alone = restarts_alone(job, settings)
    name = container_name(settings)

    def codes(operator: str, *values: int) -> Object:
        # in order, as Kubernetes wants them
        return {"containerName": name, "operator": operator, "values": sorted(values)}

    final = codes("In", exit_codes.RESUME_CODE, *_PERMANENT)
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    # an error of a process's own would come again; the whole job may do better
    own_error = codes("NotIn", exit_codes.PEER_FAILED, *(_KILLED if alone else ()))
    return [
        {"action": "FailJob", "onExitCodes": final},
        {"action": "Ignore" if alone else "FailJob", "onPodConditions": disrupted},
        {"action": "FailJob", "onExitCodes": own_error},
    ]


def journal_claim(job: JobSpec, settings: ClusterSettings) -> Object:
    """The claim of the journals; it outlives the job, so that a new one can resume.

    An object of its own: JobSet refuses to use a claim of its volumeClaimPolicies again.
    """
    chosen = {"storageClassName": settings.storage_class} if settings.storage_class else {}
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    labels = {"app.kubernetes.io/managed-by": "fleetlight"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim_of(job), **namespace, "labels": labels},
        "spec": {
            "accessModes": [settings.journal_access],
            **chosen,
            "resources": {"requests": {"storage": settings.journal_size}},
        },
    }


def training_runtime(job: JobSpec, settings: ClusterSettings) -> Object:
    """The same job as a template of Kubeflow Trainer: each TrainJob makes a JobSet from it."""
    kind = "TrainingRuntime" if settings.namespace else "ClusterTrainingRuntime"
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    labels = {"trainer.kubeflow.org/framework": "fleetlight"}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": kind,
        "metadata": {"name": name_of(job), **namespace, "labels": labels},
        "spec": {
            "mlPolicy": {"numNodes": job.worker.count},
            "template": {"spec": jobset_spec(job, settings)},
        },
    }


def rescaled(found: Mapping[str, Any], counts: Mapping[str, int]) -> Object:
    """A JobSet of the cluster as a new one with other counts, which resumes."""
    spec = copy.deepcopy(dict(found["spec"]))
    roles = {one["name"]: one["template"]["spec"] for one in spec["replicatedJobs"]}
    for kind in counts:
        if kind not in roles:
            raise ConfigError(f"--{kind}_num: the job has no {kind}s; it has {', '.join(roles)}s")
    for kind, count in counts.items():
        roles[kind] |= {"completions": count, "parallelism": count}
        if "backoffLimit" in roles[kind]:
            roles[kind]["backoffLimit"] = count - 1
    workers = roles["worker"]["completions"]
    servers = roles.get("server", {}).get("completions", 0)
    for role in roles.values():
        [container] = role["template"]["spec"]["containers"]
        wanted = {"FLEET_WORKER_NUM": str(workers), "FLEET_RESUME": "1"}
        if servers:
            wanted["FLEET_SERVER_NUM"] = str(servers)
        kept = [entry for entry in container["env"] if entry["name"] not in wanted]
        container["env"] = kept + [{"name": n, "value": value} for n, value in wanted.items()]
        for mount in container["volumeMounts"]:
            if mount["name"] == "journal" and "subPath" in mount:
                mount["subPath"] = journal_folder(workers, servers)
    head = found["metadata"]
    metadata = {"name": head["name"], "labels": head.get("labels", {})}
    return {"apiVersion": found["apiVersion"], "kind": "JobSet", "metadata": metadata, "spec": spec}


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
