# SPDX-License-Identifier: Apache-2.0
"""What the cluster says about a job, as states of its processes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fleetlight.launch.backends import MemberState

#: a pod, or a part of one
_Object = Mapping[str, Any]

_ROLE = "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX = "batch.kubernetes.io/job-completion-index"


def member_of(pod: _Object) -> tuple[str, int]:
    """The role and the index of a pod."""
    head = pod["metadata"]
    return head.get("labels", {}).get(_ROLE, "?"), int(head.get("annotations", {}).get(_INDEX, 0))


def in_order(pods: Sequence[_Object]) -> list[_Object]:
    """Servers before workers, by index; the pods of one process from the oldest to the newest."""
    return sorted(pods, key=lambda pod: (*member_of(pod), pod["metadata"]["creationTimestamp"]))


def members(pods: Sequence[_Object]) -> list[MemberState]:
    """The processes by their newest pods."""
    newest: dict[tuple[str, int], _Object] = {}
    replaced: dict[tuple[str, int], int] = {}
    for pod in in_order(pods):
        who = member_of(pod)
        if who in newest:
            replaced[who] = replaced.get(who, 0) + 1
        newest[who] = pod
    return [_member(who, pod, replaced.get(who, 0)) for who, pod in newest.items()]


def _member(who: tuple[str, int], pod: _Object, replaced: int) -> MemberState:
    state, detail = _state(pod)
    notes = [detail, f"replaced {replaced} times" if replaced > 1 else "replaced once"]
    text = "; ".join(note for note in notes[: 1 + bool(replaced)] if note)
    return MemberState(f"{who[0]} {who[1]}", state, pod["spec"].get("nodeName", ""), text)


def _state(pod: _Object) -> tuple[str, str]:
    """The state of a pod in one word, and what else is known."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses", []):
        state = container.get("state", {})
        if "terminated" in state:
            return status.get("phase", "Failed"), _ended(state["terminated"])
        if "waiting" in state:
            waiting = state["waiting"]
            return waiting.get("reason", "Waiting"), _line(waiting.get("message", ""))
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating", ""
    unscheduled = [
        condition
        for condition in status.get("conditions", [])
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
    detail = unscheduled[0].get("message", "") if unscheduled else status.get("message", "")
    return status.get("phase", "Unknown"), _line(detail)


def _ended(ended: _Object) -> str:
    code, reason = ended.get("exitCode", 0), ended.get("reason", "")
    if not code:
        return ""
    why = f" ({reason})" if reason not in ("", "Error") else ""
    error = _error(ended.get("message", ""))
    return f"exit code {code}{why}" + (f": {error}" if error else "")


def _error(message: str) -> str:
    """The error in the termination message of a process, else the last line of its output."""
    try:
        found = json.loads(message)
    except ValueError:
        return message.strip().splitlines()[-1] if message.strip() else ""
    return str(found.get("error", "")) if isinstance(found, dict) else ""


def _line(text: str) -> str:
    return " ".join(text.split())


def job_state(jobset: _Object, pods: Sequence[_Object], events: Sequence[_Object]) -> MemberState:
    """The state of the whole job; without its pods, why there are none."""
    status, spec = jobset.get("status", {}), jobset["spec"]
    wanted = sum(one["template"]["spec"].get("completions", 1) for one in spec["replicatedJobs"])
    restarts = status.get("restarts", 0)
    detail = f"restarted {restarts} times" if restarts else ""
    if terminal := status.get("terminalState", ""):
        reasons = [
            c.get("message", "") for c in status.get("conditions", []) if c["type"] == terminal
        ]
        text = _line("; ".join(filter(None, [*reasons, detail])))
        return MemberState("job", terminal, "", text, is_over=True)
    if spec.get("suspend"):
        return MemberState("job", "Suspended", "", detail or "waits in a queue, or was suspended")
    state = "Terminating" if "deletionTimestamp" in jobset["metadata"] else "Active"
    if len({member_of(pod) for pod in pods}) < wanted and events:
        newest = max(events, key=lambda event: event.get("lastTimestamp") or "")
        detail = _line(newest.get("message", ""))
    return MemberState("job", state, "", detail)
