# SPDX-License-Identifier: Apache-2.0
"""Runs a JobSet from its manifest with real processes, as Kubernetes and JobSet 0.12 describe it.

Each pod has a network namespace of its own. A pod that takes the place of another one has another
address under the same name. What a manifest says about scheduling has no effect here.
"""

import contextlib
import dataclasses
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rig.hosts import Host, Rig, hosts
from tests.engines import container, documents

from rig import spaces

#: how often a wait looks at files
_LOOK_S = 0.05
#: how long a Job collects the ends of pods, and how long an index without a pod waits for the
#: next one (1 s and 10 s in Kubernetes)
_BATCH_S, _BACKOFF_S = 0.5, 2.0
_NAMESPACES = Path("/etc/netns")


class Pod:
    """One pod."""

    def __init__(
        self, job: str, index: int, host: Host, process: subprocess.Popen[str], folder: Path
    ) -> None:
        self.job, self.index, self.host = job, index, host
        self.process, self.folder = process, folder
        #: it has the condition DisruptionTarget
        self.is_disrupted = False

    @property
    def name(self) -> str:
        """`worker 1`."""
        return f"{self.job} {self.index}"

    @property
    def log(self) -> str:
        """What it has printed so far."""
        return (self.folder / "log").read_text()

    @property
    def code(self) -> int | None:
        """The exit code, 128 + n after signal n; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """SIGTERM to the first process of the container."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all processes of the container, as after a lack of memory or by its node."""
        for pid in spaces.inhabitants(self.host.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclasses.dataclass
class IndexedJob:
    """An Indexed Job: a pod for each index until each has succeeded, or the Job fails."""

    name: str
    spec: Mapping[str, Any]
    pods: dict[int, Pod] = dataclasses.field(default_factory=dict)
    failures: dict[int, int] = dataclasses.field(default_factory=dict)
    succeeded: set[int] = dataclasses.field(default_factory=set)
    #: the reason and the message of the condition Failed
    failed: tuple[str, str] | None = None

    def fails_with(self, pod: Pod, code: int) -> bool:
        """True for a pod with which the Job fails at once."""
        return code != 0 and self._action(pod, code)[0] == "FailJob"

    @property
    def is_complete(self) -> bool:
        """True once every index has succeeded."""
        return len(self.succeeded) == self.spec["completions"]

    def end(self, pod: Pod, code: int) -> None:
        """A pod has ended; afterwards an index without a pod needs another one."""
        del self.pods[pod.index]
        if code == 0:
            self.succeeded.add(pod.index)
            return
        action, why = self._action(pod, code)
        if action == "FailJob":
            self.failed = ("PodFailurePolicy", why)
        elif action == "Count":
            self._count(pod.index)

    def _action(self, pod: Pod, code: int) -> tuple[str, str]:
        """What the first rule that matches says, and the message of Kubernetes."""
        for number, rule in enumerate(self.spec["podFailurePolicy"]["rules"]):
            what = f"matching {rule['action']} rule at index {number}"
            if "onPodConditions" in rule:
                kinds = [one["type"] for one in rule["onPodConditions"]]
                if pod.is_disrupted and "DisruptionTarget" in kinds:
                    return rule["action"], f"Pod x/y has condition DisruptionTarget {what}"
            elif _matches(code, rule["onExitCodes"]):
                named = rule["onExitCodes"]["containerName"]
                return rule[
                    "action"
                ], f"Container {named} for pod x/y failed with exit code {code} {what}"
        return "Count", ""

    def _count(self, index: int) -> None:
        self.failures[index] = self.failures.get(index, 0) + 1
        per_index = self.spec.get("backoffLimitPerIndex")
        if per_index is None:
            if sum(self.failures.values()) > self.spec["backoffLimit"]:
                self.failed = ("BackoffLimitExceeded", "Job has reached its backoff limit")
        elif self.failures[index] > per_index:
            assert self.spec["maxFailedIndexes"] == 0
            self.failed = ("MaxFailedIndexesExceeded", "Job has exceeded its failed indexes")


def _matches(code: int, wanted: Mapping[str, Any]) -> bool:
    return (code in wanted["values"]) == (wanted["operator"] == "In")


class Cluster:
    """Hosts for pods, and folders for claims."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.folder = folder
        self._free = iter(rig.hosts)
        self._all = rig.hosts
        self._numbers = iter(range(10_000))
        #: by the name of a host: its address
        self._names: dict[str, str] = {}
        for host in rig.hosts:
            (_NAMESPACES / host.name).mkdir(parents=True)
            (_NAMESPACES / host.name / "nsswitch.conf").write_text("hosts: files\n")
        self._write_names()

    def claim(self, name: str) -> Path:
        """A claim that exists, made if necessary."""
        path = self.folder / "claims" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def next_host(self) -> Host:
        """A host that no pod has had."""
        return next(self._free)

    def new_folder(self, name: str) -> Path:
        """A folder for a pod."""
        return self.folder / "pods" / f"{next(self._numbers)}-{name}"

    def publish(self, name: str, address: str) -> None:
        """Let a name of a headless service lead to a pod."""
        self._names[name] = address
        self._write_names()

    def _write_names(self) -> None:
        lines = [f"{address} {name}\n" for name, address in self._names.items()]
        text = "127.0.0.1 localhost\n" + "".join(lines)
        for host in self._all:
            # in place, since processes see the file through a mount
            (_NAMESPACES / host.name / "hosts").write_text(text)

    def remove(self) -> None:
        """Remove what the hosts had outside their folders."""
        for host in self._all:
            for file in (_NAMESPACES / host.name).iterdir():
                file.unlink()
            (_NAMESPACES / host.name).rmdir()
        with contextlib.suppress(OSError):
            _NAMESPACES.rmdir()


@contextlib.contextmanager
def cluster(pods: int, folder: Path) -> Iterator[Cluster]:
    """A cluster in which so many pods can start, one after another or side by side."""
    with hosts(pods) as rig:
        made = Cluster(rig, folder)
        try:
            yield made
        finally:
            made.remove()


class RunningJobSet:
    """A JobSet of a manifest; it runs while the test calls one of its `run` methods."""

    def __init__(
        self, manifest: str, where: Cluster, secret: Mapping[str, str], uid: str = "uid-1"
    ) -> None:
        self._cluster, self._uid = where, uid
        found = {one["kind"]: one for one in documents.read(manifest)}
        self._head, self.spec = found["JobSet"]["metadata"], found["JobSet"]["spec"]
        name = found["Secret"]["metadata"]["name"]
        self._secrets = {name: container.secret_values(found["Secret"], secret)}
        if "PersistentVolumeClaim" in found:
            where.claim(found["PersistentVolumeClaim"]["metadata"]["name"])
        self.restarts = self._counted = 0
        #: Completed or Failed
        self.state = ""
        #: the reasons of failed Jobs
        self.failures: list[str] = []
        self.ended: list[Pod] = []
        self.jobs: list[IndexedJob] = []
        #: by Job and index: when the next pod starts
        self._due: dict[tuple[str, int], float] = {}
        self._batch_ends: float | None = None
        self._create()

    # -- what a test asks and does

    def pod(self, name: str) -> Pod:
        """The pod that runs as `worker 1`."""
        [found] = [pod for pod in self._running() if pod.name == name]
        return found

    def has(self, name: str) -> bool:
        """True while a pod runs as `worker 1`."""
        return any(pod.name == name and pod.code is None for pod in self._running())

    def logs(self, name: str = "") -> str:
        """The output of all pods, or of those of one process, from the oldest to the newest."""
        pods = sorted([*self.ended, *self._running()], key=lambda pod: pod.process.pid)
        return "".join(f"== {p.name} {p.code}\n{p.log}" for p in pods if name in ("", p.name))

    def run_until(self, condition: Callable[[], bool], within_s: float = 120.0) -> None:
        """Run until the condition holds."""
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, self.logs()
            assert not self.state, f"the JobSet is {self.state}\n{self.logs()}"
            self._step()

    def run_to_end(self, within_s: float = 150.0) -> str:
        """Run until the JobSet has ended; returns its state."""
        end = time.monotonic() + within_s
        while not self.state:
            assert time.monotonic() < end, self.logs()
            self._step()
        return self.state

    def delete(self) -> dict[str, int]:
        """Delete the JobSet: each pod may save in its grace period; returns the exit codes."""
        return self._end_pods(self._running())

    def evict(self, name: str) -> None:
        """Take a pod from its node, as a drain does."""
        pod = self.pod(name)
        pod.is_disrupted = True
        pod.terminate()

    # -- the controllers

    def _create(self) -> None:
        self._due.clear()
        self.jobs = [
            IndexedJob(one["name"], one["template"]["spec"]) for one in self.spec["replicatedJobs"]
        ]
        for job in self.jobs:
            for index in range(job.spec["completions"]):
                self._start(job, index)

    def _start(self, job: IndexedJob, index: int) -> None:
        host = self._cluster.next_host()
        name, namespace = self._head["name"], self._head.get("namespace", "default")
        assert self.spec["network"]["enableDNSHostnames"]
        hostname = f"{name}-{job.name}-0-{index}"
        place = container.Place(
            namespace, name, self._uid, self.restarts, index, host.address, self._secrets
        )
        folder = self._cluster.new_folder(f"{job.name}-{index}")
        pod, claims = job.spec["template"]["spec"], self._cluster.folder / "claims"
        process = container.start(pod, place, host, folder, claims)
        domain = f"{name}.{namespace}.svc.cluster.local"
        self._cluster.publish(f"{hostname}.{domain}", host.address)
        job.pods[index] = Pod(job.name, index, host, process, folder)

    def _running(self) -> list[Pod]:
        return [pod for job in self.jobs for pod in job.pods.values()]

    def _step(self) -> None:
        """Wait a moment for a pod to end, and react; those that fail a Job come first."""
        _wait(self._running(), _LOOK_S)
        now = time.monotonic()
        for job, index in [who for who, at in self._due.items() if at <= now]:
            del self._due[job, index]
            self._start(self._job(job), index)
        ended = [(self._job(pod.job), pod) for pod in self._running() if pod.code is not None]
        if ended and self._batch_ends is None:
            self._batch_ends = now + _BATCH_S
        if self._batch_ends is None or now < self._batch_ends:
            return
        self._batch_ends = None
        for job, pod in sorted(ended, key=lambda e: not e[0].fails_with(e[1], e[1].code or 0)):
            self._end(job, pod)
            if job.failed is not None or self.state:
                return

    def _job(self, name: str) -> IndexedJob:
        [found] = [job for job in self.jobs if job.name == name]
        return found

    def _end(self, job: IndexedJob, pod: Pod) -> None:
        code = pod.code
        assert code is not None
        pod.kill()
        self.ended.append(pod)
        job.end(pod, code)
        if job.failed is not None:
            self._fail(job)
        elif self._is_successful():
            self._finish("Completed")
        elif pod.index not in job.succeeded:
            self._due[job.name, pod.index] = time.monotonic() + _BACKOFF_S

    def _is_successful(self) -> bool:
        targets = self.spec["successPolicy"]["targetReplicatedJobs"]
        return all(job.is_complete for job in self.jobs if job.name in targets)

    def _fail(self, job: IndexedJob) -> None:
        """Do what the failure policy of the JobSet says about a failed Job."""
        assert job.failed is not None
        policy, (reason, message) = self.spec["failurePolicy"], job.failed
        self.failures.append(f"{job.name}: {reason}: {message}")
        actions = [
            rule["action"]
            for rule in policy["rules"]
            if reason in rule["onJobFailureReasons"]
            and any(re.search(text, message) for text in rule["onJobFailureMessagePatterns"])
        ]
        action = actions[0] if actions else "RestartJobSet"
        may_restart = action == "RestartJobSetAndIgnoreMaxRestarts"
        if action == "RestartJobSet" and self._counted < policy["maxRestarts"]:
            self._counted += 1
            may_restart = True
        if not may_restart:
            self._finish("Failed")
            return
        self._end_pods(self._running())
        self.restarts += 1
        self._create()

    def _finish(self, state: str) -> None:
        self._end_pods(self._running())
        self.state = state

    def _end_pods(self, pods: list[Pod]) -> dict[str, int]:
        """End pods as a deletion does: SIGTERM, and SIGKILL after the grace period."""
        templates = [job.spec["template"]["spec"] for job in self.jobs]
        end = time.monotonic() + max(pod["terminationGracePeriodSeconds"] for pod in templates)
        for pod in pods:
            pod.terminate()
        while (left := [pod for pod in pods if pod.code is None]) and time.monotonic() < end:
            _wait(left, _LOOK_S)
        codes = {}
        for pod in pods:
            pod.kill()
            pod.process.wait()
            code = pod.code
            assert code is not None
            codes[pod.name] = code
            self._job(pod.job).pods.pop(pod.index, None)
            self.ended.append(pod)
        return codes


def _wait(pods: list[Pod], seconds: float) -> None:
    """Wait until a pod ends, or the time is over."""
    with contextlib.ExitStack() as stack:
        watched = []
        for pod in pods:
            if pod.process.poll() is None:
                descriptor = os.pidfd_open(pod.process.pid)
                stack.callback(os.close, descriptor)
                watched.append(descriptor)
        select.select(watched, [], [], seconds if len(watched) == len(pods) else 0)
