# SPDX-License-Identifier: Apache-2.0
"""The pods of a job: their variables, volumes, resources and rights."""

from __future__ import annotations

import dataclasses
import math
import posixpath
from typing import Any

from fleetlight.errors import ConfigError
from fleetlight.launch.backends.kubernetes.secrets import TOKEN_KEY, certificate_files
from fleetlight.launch.backends.kubernetes.settings import TRAINER, ClusterSettings
from fleetlight.launch.job.encryption import variables
from fleetlight.launch.job.spec import DEFAULT_PORT, JobSpec, RoleSpec
from fleetlight.launch.job.token import VARIABLE
from fleetlight.roles.role import Kind
from fleetlight.store import is_url

#: an object of Kubernetes, or a part of one
Object = dict[str, Any]

#: the length of the longest name that leaves room for the names of pods
_NAME_LENGTH = 40
#: where the claims of the job appear in its pods
CHECKPOINTS, CERTIFICATES = "/checkpoint", "/tls"
#: the folder in the working directory that servers and workers keep their logs in
_JOURNAL = "durability"
_JOBSET = "jobset.sigs.k8s.io"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def name_of(job: JobSpec) -> str:
    """The name of the job's objects; it begins with a letter, as names of hosts do."""
    name = job.name if job.name[0].isalpha() else f"job-{job.name}"
    return name[:_NAME_LENGTH].rstrip("-")


def claim_of(job: JobSpec) -> str:
    """The claim that holds the journals of the job."""
    return f"{name_of(job)}-journal"


def journal_folder(workers: int, servers: int) -> str:
    """The folder of the journals on the claim: a journal fits one number of processes."""
    return f"{servers}-servers-{workers}-workers"


def restarts_alone(job: JobSpec, settings: ClusterSettings) -> bool:
    """True when a killed pod can resume, since its journal outlives it."""
    return bool(job.server.count and settings.journal_size)


def pod_template(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> Object:
    """The template of the pods of one role."""
    labels = {"app.kubernetes.io/managed-by": "fleetlight", "fleetlight/role": role.kind.value}
    return {"metadata": {"labels": labels}, "spec": _pod(job, role, settings)}


def container_name(settings: ClusterSettings) -> str:
    """The name of the container; Trainer looks for `node`."""
    return "node" if settings.runtime == TRAINER else "fleetlight"


def _pod(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> Object:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.stop_s if job.checkpoint else job.grace_s),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **_placement(settings),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user,
            "runAsGroup": settings.user,
            "fsGroup": settings.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, role, settings)],
        "volumes": _volumes(job, role, settings),
    }


def _placement(settings: ClusterSettings) -> Object:
    """Where the pods may run, and as whom."""
    wanted = {
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [{"key": key, "operator": "Exists"} for key in settings.tolerate],
        "imagePullSecrets": [{"name": settings.pull_secret}] if settings.pull_secret else [],
    }
    return {name: value for name, value in wanted.items() if value}


def _container(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> Object:
    return {
        "name": container_name(settings),
        "image": settings.image,
        "command": ["fleetlight", "member", "--", "python", *job.command],
        "workingDir": settings.workdir,
        "env": _environment(job, role, settings),
        "resources": _resources(role),
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({} if role.kind is Kind.WORKER else {"readinessProbe": _readiness()}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": settings.read_only_root,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(job, role, settings),
    }


def _readiness() -> Object:
    """Ready when a socket of the pod listens: its port is free to choose.

    A connection would count as a process without the token.
    """
    tables = ("/proc/net/tcp", "/proc/net/tcp6")
    return {"exec": {"command": ["grep", "-q", " 0A ", *tables]}, "periodSeconds": 5}


def _resources(role: RoleSpec) -> Object:
    wanted = role.resources
    memory = {} if wanted.memory_mib is None else {"memory": f"{wanted.memory_mib}Mi"}
    gpus = {"nvidia.com/gpu": wanted.gpus} if wanted.gpus else {}
    limits = {**memory, **gpus}
    return {
        "requests": {"cpu": wanted.cpus, **memory, **gpus},
        **({"limits": limits} if limits else {}),
    }


def _environment(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> list[Object]:
    """The variables of a container; those that others refer to come first."""
    fields = {
        "K8S_NAMESPACE": "metadata.namespace",
        "K8S_JOBSET": f"metadata.labels['{_JOBSET}/jobset-name']",
        "K8S_JOBSET_UID": f"metadata.labels['{_JOBSET}/jobset-uid']",
        "FLEET_INDEX": _INDEX,
        "FLEET_RESTART": f"metadata.labels['{_JOBSET}/restart-attempt']",
        **({} if job.ssl else {"FLEET_HOST": "status.podIP"}),
    }
    identity = {
        "FLEET_ROLE": role.kind.value,
        **job.counts,
        "FLEET_MASTER": f"{_host(_keeper(job), '0', settings)}:{DEFAULT_PORT}",
        # certificates name hosts, not the addresses of pods
        **({"FLEET_HOST": _host(role.kind, "$(FLEET_INDEX)", settings)} if job.ssl else {}),
        # two jobs of one name are different jobs
        "FLEET_JOB": "$(K8S_JOBSET)-$(K8S_JOBSET_UID)",
        # without a journal no process resumes alone, so none needs to write one
        "FLEET_MAX_RESTARTS": str(max(1, job.max_restarts) if restarts_alone(job, settings) else 0),
        **({"FLEET_DEVICE": "0"} if role.resources.gpus else {}),
        **_shared(job),
    }
    _refuse_identity(job, {*fields, *identity, VARIABLE})
    others = {**_defaults(job, role), **job.engine.variables}
    return [
        *(
            {"name": n, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for n, path in fields.items()
        ),
        {
            "name": VARIABLE,
            "valueFrom": {"secretKeyRef": {"name": name_of(job), "key": TOKEN_KEY}},
        },
        *({"name": name, "value": value} for name, value in {**identity, **others}.items()),
    ]


def _keeper(job: JobSpec) -> Kind:
    """The role at whose first process the others meet."""
    return job.roles[0].kind


def _host(kind: Kind, index: str, settings: ClusterSettings) -> str:
    """The name that a pod keeps when it is replaced, in full: the pod itself knows that one."""
    domain = f"$(K8S_JOBSET).$(K8S_NAMESPACE).svc.{settings.cluster_domain}"
    return f"$(K8S_JOBSET)-{job_name(kind, settings)}-0-{index}.{domain}"


def job_name(kind: Kind, settings: ClusterSettings) -> str:
    """The name of the replicated job of a role; Trainer's own is `node`."""
    is_trainers = settings.runtime == TRAINER and kind is Kind.WORKER
    return "node" if is_trainers else kind.value


def saves_on_claim(job: JobSpec) -> bool:
    """Whether the job saves into a folder; one that saves under a URL needs no claim."""
    return job.checkpoint is not None and not is_url(job.checkpoint)


def checkpoint_path(job: JobSpec) -> str:
    """The checkpoint folder in the pods: a URL, or a folder of this name on the claim."""
    if not saves_on_claim(job):
        return job.checkpoint or ""
    return posixpath.join(CHECKPOINTS, posixpath.basename((job.checkpoint or "").rstrip("/")))


def _shared(job: JobSpec) -> dict[str, str]:
    """The variables of any backend, with the paths that hold in the pods."""
    ssl = None if job.ssl is None else dataclasses.replace(job.ssl, folder=CERTIFICATES)
    folder = {} if job.checkpoint is None else {"FLEET_CHECKPOINT": checkpoint_path(job)}
    return {**job.environment, **variables(ssl), **folder}


def _defaults(job: JobSpec, role: RoleSpec) -> dict[str, str]:
    """Variables that the user may change."""
    return {
        "OMP_NUM_THREADS": str(role.resources.cpus),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "FLEET_DEADLINE_S": f"{job.deadline_s:g}",
        # the user of the pods may have no home in the image
        "HOME": "/tmp",
    }


def _refuse_identity(job: JobSpec, taken: set[str]) -> None:
    for name in job.engine.variables:
        if name in taken:
            raise ConfigError(
                f"--env {name}: the job's description on Kubernetes sets this variable; omit it"
            )


def _volumes(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> list[Object]:
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}},
    ]
    if _has_journal(job, role):
        volumes.append({"name": "journal", **_journal(job, settings)})
    if saves_on_claim(job) and role.kind is not Kind.SCHEDULER:
        volumes.append({"name": "checkpoint", **_claimed(settings.checkpoint_claim)})
    if job.ssl is not None:
        volumes.append({"name": "tls", "secret": _certificates(job)})
    for number, mount in enumerate(settings.mount):
        volumes.append({"name": f"mount-{number}", **_claimed(mount.claim)})
    return volumes


def _mounts(job: JobSpec, role: RoleSpec, settings: ClusterSettings) -> list[Object]:
    mounts: list[Object] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if _has_journal(job, role):
        folder = journal_folder(job.worker.count, job.server.count)
        path = posixpath.join(settings.workdir, _JOURNAL)
        below = {"subPath": folder} if settings.journal_size else {}
        mounts.append({"name": "journal", "mountPath": path, **below})
    if saves_on_claim(job) and role.kind is not Kind.SCHEDULER:
        mounts.append({"name": "checkpoint", "mountPath": CHECKPOINTS})
    if job.ssl is not None:
        mounts.append({"name": "tls", "mountPath": CERTIFICATES, "readOnly": True})
    for number, mount in enumerate(settings.mount):
        part = {"readOnly": True} if mount.read_only else {}
        mounts.append({"name": f"mount-{number}", "mountPath": mount.path, **part})
    return mounts


def _has_journal(job: JobSpec, role: RoleSpec) -> bool:
    return bool(job.server.count) and role.kind is not Kind.SCHEDULER


def _journal(job: JobSpec, settings: ClusterSettings) -> Object:
    """A claim if the journals outlive their pods."""
    return _claimed(claim_of(job)) if settings.journal_size else {"emptyDir": {}}


def _claimed(claim: str) -> Object:
    return {"persistentVolumeClaim": {"claimName": claim}}


def _certificates(job: JobSpec) -> Object:
    """The files of the job's secret that are certificates and keys, for the pods' group."""
    assert job.ssl is not None
    items = [{"key": name, "path": name} for name in certificate_files(job.ssl.folder)]
    return {"secretName": name_of(job), "defaultMode": 0o440, "items": items}
