# SPDX-License-Identifier: Apache-2.0
"""`Kubectl`: asks the cluster by the user's own kubectl, and passes its refusals on in a line."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from fleetlight.errors import ConfigError, LaunchError

#: how long a request may take, and kubectl with it
_REQUEST_S, _LIMIT_S = 30, 60.0
_MANIFESTS = (
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/"
    "v0.12.0/manifests.yaml"
)
#: how the library of kubectl repeats each error, before kubectl itself names it
_OF_LIBRARY = re.compile(r"[EWIF]\d{4} \d\d:\d\d:\d\d")
_NO_JOB = re.compile(r'\(NotFound\): jobsets\S* "([^"]+)" not found')
#: what a part of a refusal means, and what to do
_REMEDIES = {
    'no matches for kind "JobSet"': f"the cluster has no JobSet; install it: {_MANIFESTS}",
    'resource type "jobset"': f"the cluster has no JobSet; install it: {_MANIFESTS}",
    "AlreadyExists": "end that job with fleetlight stop, or give this one another --name",
    "exceeded quota": "ask for less (--worker_cpus, --worker_memory), or use another namespace",
    "(Forbidden)": "ask the owner of the namespace for the right, or use another namespace",
    "(NotFound)": "fleetlight ps lists a job by the name that fleetrun printed",
    "current-context": "choose a cluster: kubectl config use-context NAME",
    "localhost:8080": "choose a cluster: kubectl config use-context NAME",
}


class Kubectl:
    """Runs kubectl in a namespace; "" is that of its context."""

    def __init__(self, namespace: str = "") -> None:
        self._words = ["--namespace", namespace] if namespace else []

    def create(self, one: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, which goes to standard input, and return it as it is there."""
        return self._json("create", "-f", "-", stdin=one)

    def apply(self, one: Mapping[str, Any]) -> None:
        """Create an object, or leave it as it is."""
        self._run("apply", "-f", "-", stdin=json.dumps(one).encode())

    def get(self, *words: str) -> dict[str, Any]:
        """An object, or a list of them."""
        return self._json("get", *words)

    def delete(self, kind: str, name: str, *, wait_s: int | None = None) -> None:
        """Delete an object after what it owns; `wait_s`: wait for the end, at most so long."""
        waits = "--wait=false" if wait_s is None else "--wait=true"
        limit = () if wait_s is None else (f"--timeout={wait_s}s",)
        more_s = _LIMIT_S + (wait_s or 0)
        self._run("delete", kind, name, "--cascade=foreground", waits, *limit, limit_s=more_s)

    def logs(self, pod: str) -> bytes:
        """What a pod has printed so far."""
        return self._run("logs", pod)

    def _json(self, *words: str, stdin: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = None if stdin is None else json.dumps(stdin).encode()
        found = json.loads(self._run(*words, "--output", "json", stdin=data))
        assert isinstance(found, dict)
        return found

    def _run(self, *words: str, stdin: bytes | None = None, limit_s: float = _LIMIT_S) -> bytes:
        # a deletion, and long output, may take longer than other requests
        is_long = words[0] in ("delete", "logs")
        timeout = () if is_long else (f"--request-timeout={_REQUEST_S}s",)
        command = ["kubectl", *self._words, *timeout, *words]
        try:
            done = subprocess.run(
                command, input=stdin or b"", capture_output=True, timeout=limit_s, check=False
            )
        except FileNotFoundError:
            raise ConfigError(
                "--on kubernetes needs kubectl, which is not on PATH; install it "
                "(https://kubernetes.io/docs/tasks/tools), or use --print and apply the manifest "
                "elsewhere"
            ) from None
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"kubectl {words[0]}: no reply within {limit_s:g} s; is the cluster reachable "
                "(kubectl cluster-info)?"
            ) from None
        if done.returncode:
            raise LaunchError(refusal(words, done.stderr.decode(errors="replace")))
        return done.stdout


def refusal(words: Sequence[str], errors: str) -> str:
    """Why kubectl refused, in one line, and what to do."""
    lines = [line for line in errors.splitlines() if not _OF_LIBRARY.match(line)]
    text = " ".join(" ".join(lines).split()) or "it gave no reason"
    if (found := _NO_JOB.search(text)) is not None:
        return (
            f"the cluster has no job {found[1]} in this namespace; fleetlight ps lists a job by "
            "the name that fleetrun printed"
        )
    remedies = [remedy for part, remedy in _REMEDIES.items() if part in text]
    return f"kubectl {' '.join(words[:2])}: {text}" + "".join(f"; {r}" for r in remedies[:1])
