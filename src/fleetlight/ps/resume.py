# SPDX-License-Identifier: Apache-2.0
"""Decides how a job resumes after all its processes were killed. Pure.

Every worker reports the state of its folder and of the servers' folders. Each server receives all
reports, so all processes reach the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetlight.errors import JournalError

#: states of a worker's folder: nothing of this job; no step yet; a step to resume after; the worker
#: left the job; steps after which no worker can resume
NOTHING, STARTED, STEPPED, LEFT, UNABLE = "nothing", "started", "stepped", "left", "unable"
#: states of a server's folder that is not empty: it has values; all workers have left
KEPT, OVER = "kept", "over"
#: decisions: each worker resumes at its last step; the script restarts with the servers' values, or
#: before any step; the job has ended and its processes only exit; the job cannot resume
POSITIONS, VALUES, BEGINNING, FINISHED, REFUSED = (
    "positions",
    "values",
    "beginning",
    "finished",
    "refused",
)
#: REFUSED, unless the job may begin
_NOTHING_SAVED = "nothing saved"
_ADVICE = (
    "restore the folders, resume from a checkpoint (fleetrun --resume --checkpoint DIR), or remove "
    "the folders and start without --resume"
)


class Remains(msgspec.Struct, frozen=True):
    """The state of the folder of one process."""

    state: str = NOTHING
    #: the job that created it, which later launches continue, and the number of that job's start
    job: str = ""
    start: int = 0


class Report(msgspec.Struct, frozen=True):
    """The report of one worker."""

    remains: Remains
    servers: list[Remains]
    #: why the worker cannot resume at its last step
    why: str = ""
    #: steps before its last step
    step: int = 0
    #: the step of the checkpoint that this job may resume from, if any
    checkpoint: int | None = None
    #: True if the job begins where nothing is saved
    may_begin: bool = False


class Decision(msgspec.Struct, frozen=True):
    """What all processes do, and the reason."""

    kind: str
    why: str = ""
    #: the job of all folders
    job: str = ""
    start: int = 0

    @property
    def keeps_workers(self) -> bool:
        """True when the servers keep their state of the workers."""
        return self.kind in (POSITIONS, FINISHED)


def decide(reports: Sequence[Report]) -> Decision:
    """Decide from the reports of all workers, in worker order."""
    servers, checkpoint = reports[0].servers, reports[0].checkpoint
    job, start = origin = _origin(servers, [report.remains for report in reports])
    kind, why = _kind(
        [_state(one, origin) for one in servers],
        [_state(report.remains, origin) for report in reports],
        reports,
    )
    if kind == _NOTHING_SAVED:
        kind = REFUSED
        if reports[0].may_begin and checkpoint is None:
            # what an ended job has left is not that of this one
            return Decision(BEGINNING, why)
    if len({one.job for one in servers if one.state == KEPT}) > 1:
        kind, why = REFUSED, "the folders of the servers are those of different jobs"
    if kind == REFUSED:
        why = why if checkpoint is not None else f"{why}; {_ADVICE}"
    if kind in (REFUSED, BEGINNING) and checkpoint is not None:
        # the checkpoint replaces the values in the folders; before any step that loses nothing
        kind, why = VALUES, why if kind == REFUSED else ""
    return Decision(kind, why, job, start)


def _origin(servers: Sequence[Remains], workers: Sequence[Remains]) -> tuple[str, int]:
    """The newest start of an unfinished job, else of a finished one."""
    going = [one for one in servers if one.state == KEPT]
    going = going or [one for one in workers if one.state in (STARTED, STEPPED)]
    known = going or [one for one in servers if one.state == OVER]
    return max(((one.job, one.start) for one in known), default=("", 0))


def _state(one: Remains, origin: tuple[str, int]) -> str:
    """Treat folders of another job or an earlier start as empty; UNABLE needs no folder."""
    return one.state if one.state == UNABLE or (one.job, one.start) == origin else NOTHING


def _kind(
    servers: Sequence[str], workers: Sequence[str], reports: Sequence[Report]
) -> tuple[str, str]:
    there = set(workers)
    if set(servers) == {OVER} and STEPPED not in there:
        return _NOTHING_SAVED, "there is nothing to resume from: the job before has ended well"
    if OVER in servers:
        return FINISHED, ""
    if set(servers) == {NOTHING} and STEPPED not in there:
        return _NOTHING_SAVED, "there is nothing to resume from"
    if not there & {STEPPED, LEFT, UNABLE}:
        return BEGINNING, "no worker had made a step"
    if NOTHING in servers:
        number = servers.index(NOTHING)
        return REFUSED, f"the workers have trained, but the folder of server {number} is empty"
    return _kind_after_training(workers, reports)


def _kind_after_training(workers: Sequence[str], reports: Sequence[Report]) -> tuple[str, str]:
    """Decide for complete server folders and workers that have trained."""
    if UNABLE in workers:
        number = workers.index(UNABLE)
        return VALUES, f"worker {number} cannot resume where it was: {reports[number].why}"
    if NOTHING in workers:
        number = workers.index(NOTHING)
        return REFUSED, f"other workers have trained, but the folder of worker {number} is empty"
    newest, logged = reports[0].checkpoint, reports[0].step + 1
    if newest is not None and workers[0] == STEPPED and newest > logged:
        return VALUES, f"the checkpoint (step {newest}) is newer than the log (step {logged})"
    return POSITIONS, ""


def check_beginning(decision: Decision, pushes: int) -> None:
    """Refuse to restart the script on values that are already trained."""
    if decision.kind == BEGINNING and pushes:
        raise JournalError(
            f"durability: this server has the pushes of workers whose folders are empty; {_ADVICE}"
        )


def check_mark(mark: int, sent: int, requests: int, held: int) -> str:
    """Why the folders of a server and a worker do not match; empty if they match.

    `mark` is the last push of the worker that the server applied. `sent` is the last push that the
    worker logged, `requests` how many it logged together. The server holds `held` pushes until
    their norm is known; workers do not log those.
    """
    if mark < sent - requests:
        return f"it has the worker's pushes up to {mark}, but {sent - requests} were acknowledged"
    if mark > sent + held:
        return f"it has the worker's pushes up to {mark}, but the worker's folder ends with {sent}"
    return ""
