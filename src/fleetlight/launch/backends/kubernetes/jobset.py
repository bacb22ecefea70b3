# SPDX-License-Identifier: Apache-2.0
"""The objects of a job: a JobSet, its secret and the claim of its journals.

A pod is the unit of one restart, the JobSet that of a restart of the whole job.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from fleetlight.errors import ConfigError
from fleetlight.launch import exit_codes
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
from fleetlight.launch.backends.kubernetes.settings import TRAINER, ClusterSettings
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
