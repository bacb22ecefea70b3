# SPDX-License-Identifier: Apache-2.0
"""How a job that was killed as a whole resumes. Pure: from what is left to what all do.

Every worker reports what its folder holds and what it heard of the servers' folders. Each server
hears all reports, so that all processes decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetlight.errors import JournalError

#: of a worker's folder: nothing of this job; no step yet; a step to resume behind; it has left the
#: job; steps that no later life can resume behind
NOTHING, STARTED, STEPPED, LEFT, UNABLE = "nothing", "started", "stepped", "left", "unable"
#: of a server's folder, if it holds anything: values; all workers have left it
KEPT, OVER = "kept", "over"
#: what all do: each worker resumes where it was; the script begins at its beginning, with the
#: servers' values or before any step; the job has ended, but for its exits; nothing
POSITIONS, VALUES, BEGINNING, FINISHED, REFUSED = (
    "positions",
    "values",
    "beginning",
    "finished",
    "refused",
)
_ADVICE = (
    "restore the folders, resume from a checkpoint (fleetrun --resume --checkpoint DIR), or remove "
    "the folders and start without --resume"
)


class Remains(msgspec.Struct, frozen=True):
    """What one process has left in its folder."""

    state: str = NOTHING
    #: the job that began it, in whichever launch it goes on, and which start of that
    job: str = ""
    start: int = 0


class Report(msgspec.Struct, frozen=True):
    """What one worker knows."""

    remains: Remains
    servers: list[Remains]
    #: why it is unable to resume where it was
    why: str = ""
    #: steps before its last one
    step: int = 0
    #: the step of the checkpoint that this job may resume from, if there is one
    checkpoint: int | None = None


class Decision(msgspec.Struct, frozen=True):
    """What all processes do, and why not more."""

    kind: str
    why: str = ""
    #: the job that all folders belong to
    job: str = ""
    start: int = 0

    @property
    def keeps_workers(self) -> bool:
        """True where servers go on with what they know of the workers."""
        return self.kind in (POSITIONS, FINISHED)


def decide(reports: Sequence[Report]) -> Decision:
    """What comes of the reports of all workers, in their order."""
    servers, checkpoint = reports[0].servers, reports[0].checkpoint
    job, start = origin = _origin(servers, [report.remains for report in reports])
    kind, why = _kind(
        [_state(one, origin) for one in servers],
        [_state(report.remains, origin) for report in reports],
        reports,
    )
    if len({one.job for one in servers if one.state == KEPT}) > 1:
        kind, why = REFUSED, "the folders of the servers are those of different jobs"
    if kind == REFUSED:
        why = why if checkpoint is not None else f"{why}; {_ADVICE}"
    if kind in (REFUSED, BEGINNING) and checkpoint is not None:
        # whose values take the place of all that is there; before any step nothing is lost by that
        kind, why = VALUES, why if kind == REFUSED else ""
    return Decision(kind, why, job, start)


def _origin(servers: Sequence[Remains], workers: Sequence[Remains]) -> tuple[str, int]:
    """The newest start of the job that did not end, else of the one that did."""
    going = [one for one in servers if one.state == KEPT]
    going = going or [one for one in workers if one.state in (STARTED, STEPPED)]
    known = going or [one for one in servers if one.state == OVER]
    return max(((one.job, one.start) for one in known), default=("", 0))


def _state(one: Remains, origin: tuple[str, int]) -> str:
    """Folders of another job, or of an earlier start, hold nothing; UNABLE needs no folder."""
    return one.state if one.state == UNABLE or (one.job, one.start) == origin else NOTHING


def _kind(
    servers: Sequence[str], workers: Sequence[str], reports: Sequence[Report]
) -> tuple[str, str]:
    there = set(workers)
    if set(servers) == {OVER} and STEPPED not in there:
        return REFUSED, "there is nothing to resume from: the job before has ended well"
    if OVER in servers:
        return FINISHED, ""
    if set(servers) == {NOTHING} and STEPPED not in there:
        return REFUSED, "there is nothing to resume from"
    if not there & {STEPPED, LEFT, UNABLE}:
        return BEGINNING, "no worker had made a step"
    if NOTHING in servers:
        number = servers.index(NOTHING)
        return REFUSED, f"the workers have trained, but the folder of server {number} is empty"
    return _of_trained(workers, reports)


def _of_trained(workers: Sequence[str], reports: Sequence[Report]) -> tuple[str, str]:
    """Where the servers have all that they had, and workers have trained."""
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
    """Refuse to begin at the beginning with values that somebody has trained."""
    if decision.kind == BEGINNING and pushes:
        raise JournalError(
            f"durability: this server has the pushes of workers whose folders are empty; {_ADVICE}"
        )


def check_mark(mark: int, sent: int, requests: int, held: int) -> str:
    """Why a server and a worker do not fit together; empty where they do.

    `mark` is the number of the last push that the server has of the worker, `sent` the number of
    the last one that the worker wrote down, `requests` how many it wrote down together. The
    server holds `held` pushes until their norm is known, which no worker writes down.
    """
    if mark < sent - requests:
        return f"it has the worker's pushes up to {mark}, but {sent - requests} were acknowledged"
    if mark > sent + held:
        return f"it has the worker's pushes up to {mark}, but the worker's folder ends with {sent}"
    return ""
