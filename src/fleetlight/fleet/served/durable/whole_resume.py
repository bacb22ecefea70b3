# SPDX-License-Identifier: Apache-2.0
"""Resumes a job that was killed as a whole: workers report, and all processes decide alike."""

from __future__ import annotations

# not `from fleetlight import`, which imports the API and would be a circle
import fleetlight.checkpoint as checkpoint
from fleetlight.checkpoint import WorkerState
from fleetlight.errors import ComebackError, JournalError
from fleetlight.fleet.exit.exit_status import report_left_job
from fleetlight.fleet.plan.durability_dir import asks_to_resume
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.resume import (
    BEGINNING,
    FINISHED,
    LEFT,
    POSITIONS,
    REFUSED,
    UNABLE,
    Decision,
    Remains,
    Report,
    check_mark,
)
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL
from fleetlight.ps.worker.replay.commit_log import Committed
from fleetlight.ps.worker.replay.worker_journal import WorkerJournal
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy

_NOTHING_KEPT = "with dense='allreduce' neither servers nor workers keep the dense values"


def resume_with_all(
    client: Client, role: Role, strategy: DistributedStrategy, *, waits: bool
) -> None:
    """When the whole job restarts: decide with all workers how, and write it into the folder.

    `waits` until the servers have their values again. A worker that had left the job leaves again,
    and its process ends here.
    """
    kept = client.journal
    journal = kept if isinstance(kept, WorkerJournal) else None
    is_asked = strategy.durability != "none" and asks_to_resume(role, strategy)
    if not is_asked or (journal is not None and not journal.is_undecided):
        return
    channels = client.open_lane(CONTROL)
    welcomes = [None if one.welcome is None else one.welcome.message for one in channels]
    remains = [one.remains for one in welcomes if isinstance(one, m.Welcome)]
    servers = [one for one in remains if one is not None]
    if len(servers) < client.server_num:
        # this worker was restarted alone, after all others had resumed
        raise ComebackError(
            "this worker was restarted after the servers had resumed; restart all processes"
        )
    resumed = _asked(client, _report(journal, role, strategy, servers), waits=waits)
    was = Remains() if journal is None else journal.remains
    last = None if journal is None else journal.last
    decision = next(iter(resumed.values())).decision
    if decision.kind == REFUSED:
        raise JournalError(f"durability: {decision.why}")
    _log_decision(decision, role, strategy)
    if journal is not None:
        journal.decide(decision)
    if not decision.keeps_workers:
        client.restart_script(before_any_step=decision.kind == BEGINNING)
    is_lost = any(one.was_lost for one in resumed.values())
    if decision.kind == FINISHED or (decision.kind == POSITIONS and was.state == LEFT) or is_lost:
        _leave_again(client, role)
    if decision.keeps_workers and last is not None and waits:
        _check_marks(client, strategy, last, resumed)


def _asked(client: Client, report: Report, *, waits: bool) -> dict[int, m.Resumed]:
    """The reply of each server; all have made the same decision."""
    found: dict[int, m.Resumed] = {}
    while missing := [n for n in range(client.server_num) if n not in found]:
        replies = client.ask(CONTROL, dict.fromkeys(missing, (m.Resume(report, waits), ())))
        messages = {n: reply.message for n, reply in replies.items()}
        found |= {n: one for n, one in messages.items() if isinstance(one, m.Resumed)}
    return found


def _report(
    journal: WorkerJournal | None, role: Role, strategy: DistributedStrategy, servers: list[Remains]
) -> Report:
    if journal is None:
        remains, why, step = Remains(UNABLE), _NOTHING_KEPT, 0
    else:
        resume_point = None if journal.last is None else journal.last.commit.resume_point
        remains, why = journal.remains, "" if resume_point is None else resume_point.why_not
        step = (
            0
            if resume_point is None or why
            else WorkerState.from_bytes(resume_point.script).values["step"]
        )
    newest = _checkpoint(strategy) if not role.index else None
    may_begin = role.may_begin and not strategy.durability_configs.resume
    return Report(remains, servers, why, step, newest, may_begin)


def _checkpoint(strategy: DistributedStrategy) -> int | None:
    """The step of the checkpoint that this job may resume from."""
    folder = strategy.checkpoint
    if not folder or not checkpoint.exists(folder):
        return None
    return checkpoint.read(folder).manifest.step


def _log_decision(decision: Decision, role: Role, strategy: DistributedStrategy) -> None:
    if role.index:
        return
    if decision.kind == POSITIONS:
        beside = f", which is newer than {strategy.checkpoint}" if strategy.checkpoint else ""
        logger.info(
            "resuming each worker at its last step, from the log in %s%s",
            strategy.durability_configs.folder,
            beside,
        )
    elif decision.kind == FINISHED:
        logger.info("the job has already ended: nothing to resume")
    elif decision.kind == BEGINNING:
        logger.info("restarting the script from its beginning: %s", decision.why)
    elif not strategy.checkpoint:
        logger.warning(
            "%s: the script restarts from its beginning with the values of the servers, so it "
            "trains on the same records again",
            decision.why,
        )
    elif decision.why:
        logger.warning("resuming from %s: %s", strategy.checkpoint, decision.why)


def _leave_again(client: Client, role: Role) -> None:
    """Leave the servers again, and end the process."""
    logger.info("this worker has already left the job: exiting")
    client.leave()
    report_left_job(role)
    client.journal.close(is_needed=False, ended=True)
    raise SystemExit


def _check_marks(
    client: Client,
    strategy: DistributedStrategy,
    last: Committed,
    resumed: dict[int, m.Resumed],
) -> None:
    """JournalError unless servers have exactly the pushes that this worker has sent."""
    commit = last.commit
    if strategy.durability != "log":
        return
    for server, one in resumed.items():
        sent, requests = commit.sequences[server], commit.servers.count(server)
        wrong = check_mark(one.mark, sent, requests, one.held)
        if wrong:
            raise JournalError(
                f"durability: server {server} and worker {client.worker} cannot resume together: "
                f"{wrong}; restore both folders to the same point in time, or resume from a "
                "checkpoint"
            )
