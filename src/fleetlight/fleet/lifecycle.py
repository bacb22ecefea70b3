# SPDX-License-Identifier: Apache-2.0
"""From `fleet.init` to the end of the process, good or bad."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from pathlib import Path

from fleetlight.collective.forming import form
from fleetlight.collective.membership.scheduler import Scheduler
from fleetlight.errors import ConfigError, FleetError, RoleError, names_arguments
from fleetlight.fleet.bootstrap import Start, join_servers
from fleetlight.fleet.collective.job import CollectiveJob
from fleetlight.fleet.exit.exit_status import (
    end_badly,
    refuse_started_reader,
    report_leaving,
    watch_no_longer,
    watch_the_end,
)
from fleetlight.fleet.job import Job, current, current_or_none, set_current
from fleetlight.fleet.reinit import InitCall, forget, take_again
from fleetlight.fleet.training import compression, local_training
from fleetlight.observe import log
from fleetlight.observe.log import logger
from fleetlight.roles import Kind, Role, RoleMaker, unsupported_variables
from fleetlight.security.context import both_contexts
from fleetlight.strategy import DistributedStrategy, JobFacts, set_current_job
from fleetlight.strategy.features.ssl import encryption_of
from fleetlight.torch_compat.lazy_dynamo import postpone_compiler
from fleetlight.torch_compat.version import untested_torch
from fleetlight.version import VERSION


@names_arguments
def init(
    role_maker: RoleMaker | None = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
) -> None:
    """Find out who this process is, and meet the others of the job.

    In a scheduler process it serves the job and ends the process; it does not return. Called again
    with the same arguments, as by a cell of a notebook, it changes nothing.
    """
    global _asked
    _check_call(role_maker, is_collective, strategy)
    maker = role_maker or RoleMaker(is_collective)
    asked = InitCall(maker.role, is_collective or maker.is_collective, strategy)
    before = current_or_none()
    if before is not None:
        _asked = take_again(before, _asked, asked)
        return
    _asked = None
    _refuse_left()
    refuse_started_reader()
    strategy, role = asked.strategy, maker.role
    if role.kind is not Kind.SCHEDULER:
        watch_the_end(role)
    deadline_s, deadline_from = _deadline(role, strategy)
    # before the others wait for this process
    strategy.check(JobFacts(deadline_s=deadline_s))
    _configure_log(role)
    tls = both_contexts(encryption_of(strategy))
    if role.kind is Kind.SCHEDULER:
        sys.exit(Scheduler(role, deadline_s, tls).run())
    for remark in maker.remarks:
        logger.info("%s", remark)
    if role.kind is Kind.WORKER and not role.index:
        # where nobody has said the indices, each may be the first
        _warn_of_untested_torch()
    postpone_compiler()
    is_collective = is_collective or maker.is_collective
    _check_mode(role, is_collective)
    _check_resume(role, strategy, is_collective)
    if is_collective:
        role, group = form(role, VERSION, deadline_s, tls=tls)
        job: Job = CollectiveJob(role=role, group=group, strategy=strategy, tls=tls)
    else:
        job = join_servers(Start(role, strategy, deadline_s, tls))
        role = job.role
    _configure_log(role)
    _warn_of_unsupported_variables(role)
    job.strategy_from = "fleet.init" if asked.is_given else ""
    set_current(job)
    try:
        _begin(job, is_collective, deadline_s, deadline_from)
    except Exception:
        if job.group.alone:
            # the next call begins anew
            reset()
        raise
    _asked = asked


def _begin(job: Job, is_collective: bool, deadline_s: float, deadline_from: str) -> None:
    """This process is in the job from now on."""
    role, strategy = job.role, job.strategy
    atexit.unregister(_leave_at_the_end)
    atexit.register(_leave_at_the_end, os.getpid(), role)
    set_current_job(
        JobFacts(
            is_collective=is_collective,
            worker_num=role.worker_num,
            server_num=role.server_num,
            node_num=role.node_num or 1,
            backend=job.group.backend,
            deadline_s=deadline_s,
            deadline_from=deadline_from,
            ssl=strategy.ssl,
            checkpoint=strategy.checkpoint,
        )
    )
    strategy.check()
    # what was registered is released first
    job.closers.callback(_release, job)
    job.watch_terminations()
    job.closers.callback(local_training.close, job)


@functools.cache
def _warn_of_untested_torch() -> None:
    """Once, also where `init` is called again."""
    remark = untested_torch()
    if remark is not None:
        logger.warning("%s", remark)


def init_worker() -> None:
    """Agree with the others on the model now, rather than at the first forward."""
    current().prepare()


@names_arguments
def init_server(dirname: str | os.PathLike[str] | None = None) -> None:
    """Make this server's tables, and load a checkpoint's values into them."""
    current().init_server(None if dirname is None else Path(dirname))


def run_server() -> None:
    """Serve until every worker has left."""
    current().run_server()


def stop_worker() -> None:
    """Leave the job, once a save in the background is on disk, and raise if that has failed.

    Called at the end of the process when the script does not; twice is fine.
    """
    job = current_or_none()
    if job is None:
        return
    local_training.tell_at_end(job)
    compression.tell_at_end(job)
    with contextlib.ExitStack() as ending:
        ending.callback(_leave, job)
        ending.callback(job.finish)
        job.saving.finish()


def reset() -> None:
    """Leave the job, if there is one, and forget all that was registered: `init` begins anew.

    For notebooks. In a job of several processes it is `stop_worker` and forgetting; `init` is then
    for a new process, since the others do not wait for this one again.
    """
    try:
        stop_worker()
    finally:
        forget()
        if not _left:
            atexit.unregister(_leave_at_the_end)
            watch_no_longer()


def _leave(job: Job) -> None:
    global _left
    set_current(None)
    _left = not job.group.alone
    job.closers.close()


def _release(job: Job) -> None:
    for model in job.models:
        model.close()


#: what the call of `fleet.init` asked for that has succeeded
_asked: InitCall | None = None
#: True once this process has left a job of several workers
_left = False


def _leave_at_the_end(pid: int, role: Role) -> None:
    # a child that the script has forked is no member of the job
    job = current_or_none()
    if os.getpid() != pid:
        return
    if job is None:
        if role.is_worker:
            report_leaving(role)
        return
    if job.stopping is None or not job.stopping.is_over:
        report_leaving(job.role)
    try:
        stop_worker()
    except FleetError as error:
        end_badly(error)


def _check_call(role_maker: object, is_collective: object, strategy: object) -> None:
    """Tell apart the three arguments, which are easily given in each other's place."""
    expected = {
        "role_maker": (role_maker, RoleMaker),
        "is_collective": (is_collective, bool),
        "strategy": (strategy, DistributedStrategy),
    }
    for name, (value, kind) in expected.items():
        if (value is None and name != "is_collective") or isinstance(value, kind):
            continue
        meant = next((n for n, (_, k) in expected.items() if isinstance(value, k)), None)
        instead = f"; write fleet.init({meant}={_shown(value)})" if meant else ""
        raise ConfigError(
            f"fleet.init: {name} is a {type(value).__name__}, expected a {kind.__name__}{instead}"
        )


def _refuse_left() -> None:
    if _left:
        raise ConfigError(
            "fleet.init after fleet.stop_worker or fleet.reset: this process has left its job, and "
            "the other workers do not wait for it again; start a new process"
        )


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, bool) else "..."


def _deadline(role: Role, strategy: DistributedStrategy) -> tuple[float, str]:
    """How long to wait for a peer, and who says so."""
    if role.deadline_s is not None and not strategy.is_set("deadline_s"):
        return role.deadline_s, role.deadline_variable or role.dialect
    return strategy.deadline_s, "the strategy" if strategy.is_set("deadline_s") else "the default"


def _check_mode(role: Role, is_collective: bool) -> None:
    if is_collective and role.server_num:
        raise RoleError(
            f"fleet.init(is_collective=True), but the job has {role.server_num} parameter servers "
            f"({role.dialect}); start it without servers, or call fleet.init()"
        )


def _check_resume(role: Role, strategy: DistributedStrategy, is_collective: bool) -> None:
    """A job that is to go on, and has nothing to go on from, would begin anew in silence."""
    has_kept = strategy.checkpoint or (strategy.durability != "none" and not is_collective)
    if role.resume and not has_kept:
        raise ConfigError(
            "--resume (FLEET_RESUME=1), but this job keeps nothing to go on from: start it with "
            "fleetrun --checkpoint DIR (strategy.checkpoint), or, with parameter servers, set "
            "strategy.durability; or begin anew without --resume"
        )


def _warn_of_unsupported_variables(role: Role) -> None:
    """Once a job: the environment of all processes is usually the same."""
    if role.is_worker and not role.index:
        for sentence in unsupported_variables():
            logger.warning("%s", sentence)


def _configure_log(role: Role) -> None:
    name = role.kind.value if role.index is None else f"{role.kind.value} {role.index}"
    quiet = role.kind is Kind.WORKER and role.index not in (0, None)
    log.configure(name, logging.WARNING if quiet else logging.INFO)
