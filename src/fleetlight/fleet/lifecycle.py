# SPDX-License-Identifier: Apache-2.0
"""The course of a process: `fleet.init`, training or serving, and the end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fleetlight.collective.forming import form
from fleetlight.collective.membership.scheduler import Scheduler
from fleetlight.errors import ConfigError, FleetError, RoleError, names_arguments
from fleetlight.fleet.exit.exit_status import (
    exit_with_error,
    install_error_hook,
    install_exit_hooks,
    refuse_spawned_child,
    remove_exit_hooks,
    report_exiting,
    report_joined,
)
from fleetlight.fleet.job import Job, current, current_or_none, set_current
from fleetlight.fleet.recording.process_metrics import start_metrics
from fleetlight.fleet.reinit import InitCall, accept_repeated_call, forget_last_job
from fleetlight.fleet.training import compression, local_training
from fleetlight.observe import log
from fleetlight.observe.log import logger
from fleetlight.roles import Kind, Role, RoleMaker, unsupported_variables
from fleetlight.roles.environment import output_variables
from fleetlight.security.context import Contexts, both_contexts
from fleetlight.strategy import DistributedStrategy, JobFacts, set_current_job
from fleetlight.strategy.features.ssl import encryption_of
from fleetlight.torch_compat.compiler.lazy_dynamo import postpone_compiler
from fleetlight.torch_compat.version import untested_torch
from fleetlight.version import VERSION

if TYPE_CHECKING:
    from fleetlight.ps.rendezvous.scheduler import RendezvousScheduler


class Deadline(NamedTuple):
    """How long to wait for a peer, and what sets it."""

    seconds: float
    source: str


@names_arguments
def init(
    role_maker: RoleMaker | None = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
) -> None:
    """Find the role of this process, and join the other processes of the job.

    In a scheduler process it serves the job and ends the process; it does not return. A second
    call with the same arguments, as in a cell of a notebook, changes nothing.

    Args:
        role_maker: where the role comes from; by default the environment, see `RoleMaker`.
        is_collective: True for workers that average gradients, False for parameter servers. One
            process without servers then has a server inside.
        strategy: the settings of the job.

    Raises:
        ConfigError: an argument is wrong, or this process has left a job before.
        RoleError: the environment does not fit `is_collective`.
        MembershipError: a process of the job did not arrive in time.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.worker_index(), fleet.worker_num()
        (0, 1)
    """
    global _accepted
    install_error_hook()
    _check_call(role_maker, is_collective, strategy)
    maker = role_maker or RoleMaker(is_collective)
    role = maker.role
    is_collective = is_collective or maker.is_collective
    is_given, strategy = strategy is not None, strategy or DistributedStrategy()
    call = InitCall(role, is_collective, strategy, is_given)
    before = current_or_none()
    if before is not None:
        _accepted = accept_repeated_call(before, _accepted, call)
        return
    _accepted = None
    _refuse_after_leaving()
    refuse_spawned_child()
    deadline = _deadline(role, strategy)
    job = _join(role, strategy, is_collective, deadline.seconds, maker.remarks)
    job.strategy_from = "fleet.init" if is_given else ""
    set_current(job)
    try:
        _begin(job, is_collective, deadline)
    except Exception:
        if job.group.alone:
            # the next call starts from nothing; the error may end the process
            reset()
            install_error_hook()
        raise
    _accepted = call
    report_joined(job.role)


def _join(
    role: Role,
    strategy: DistributedStrategy,
    is_collective: bool,
    deadline_s: float,
    remarks: Sequence[str],
) -> Job:
    """Join the job; does not return in a scheduler."""
    if role.kind is not Kind.SCHEDULER:
        install_exit_hooks(role)
    # what may refuse comes before the other processes wait for this one
    strategy.check(JobFacts(deadline_s=deadline_s))
    _configure_log(role)
    tls = both_contexts(encryption_of(strategy))
    if role.kind is Kind.SCHEDULER:
        sys.exit(_scheduler(role, deadline_s, tls).run())
    for remark in remarks:
        logger.info("%s", remark)
    if role.kind is Kind.WORKER and not role.index:
        # a worker without an index may be worker 0
        _warn_of_untested_torch()
    postpone_compiler()
    _check_mode(role, is_collective)
    _check_resume(role, strategy, is_collective)
    job: Job
    # a job loads the modules of its kind only
    if is_collective:
        from fleetlight.fleet.collective.job import CollectiveJob

        formed, group = form(role, VERSION, deadline_s, tls=tls)
        job = CollectiveJob(role=formed, group=group, strategy=strategy, tls=tls)
    else:
        from fleetlight.fleet.bootstrap import join_servers

        job = join_servers(role, strategy, deadline_s, tls)
    _configure_log(job.role)
    _warn_of_unsupported_variables(job.role)
    return job


def _scheduler(
    role: Role, deadline_s: float, tls: Contexts | None
) -> Scheduler | RendezvousScheduler:
    """The scheduler of a job, with or without servers."""
    if not role.server_num:
        return Scheduler(role, deadline_s, tls)
    assert role.master is not None
    from fleetlight.fleet.rendezvous import size_of
    from fleetlight.ps.rendezvous.scheduler import RendezvousScheduler

    return RendezvousScheduler(role.master, size_of(role), deadline_s, tls=tls, token=role.token)


def _begin(job: Job, is_collective: bool, deadline: Deadline) -> None:
    """Set up what a process of a job needs."""
    role, strategy = job.role, job.strategy
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit, os.getpid(), role)
    set_current_job(
        JobFacts(
            is_collective=is_collective,
            worker_num=role.worker_num,
            server_num=role.server_num,
            node_num=role.node_num or 1,
            backend=job.group.backend,
            deadline_s=deadline.seconds,
            deadline_from=deadline.source,
            ssl=strategy.ssl,
            checkpoint=strategy.checkpoint,
            sinks=strategy.sinks,
        )
    )
    strategy.check()
    start_metrics(job)
    # closers run in reverse order: what the script has registered is released before
    job.closers.callback(_close_models, job)
    job.watch_terminations()
    job.closers.callback(local_training.close, job)


@functools.cache
def _warn_of_untested_torch() -> None:
    """Warn once, even where `init` is called again."""
    remark = untested_torch()
    if remark is not None:
        logger.warning("%s", remark)


def init_worker() -> None:
    """Agree with the other workers on the model now, rather than at the first forward.

    Raises:
        PlanError: the model, the optimizer and the job do not fit together.
        PeerError: a server or another worker did not reply.

    Example:
        >>> fleet.init()
        >>> model = fleet.distributed_model(nn.Linear(4, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> if fleet.is_server():
        ...     fleet.init_server()
        ...     fleet.run_server()
        ... else:
        ...     fleet.init_worker()
    """
    current().prepare()


@names_arguments
def init_server(dirname: str | os.PathLike[str] | None = None) -> None:
    """Make this server's tables, and load a checkpoint's values into them.

    Args:
        dirname: a checkpoint of `save_persistables`, a folder or a URL; None for first values.

    Raises:
        RoleError: this process is a worker.
        CheckpointError: the checkpoint cannot be read, or does not fit the model.

    Example:
        >>> fleet.init()
        >>> if fleet.is_server():
        ...     fleet.init_server("checkpoint")
        ...     fleet.run_server()
    """
    current().init_server(None if dirname is None else os.fspath(dirname))


def run_server() -> None:
    """Serve until every worker has left.

    Raises:
        RoleError: this process is a worker.
        ConfigError: `fleet.init_server()` was not called before.

    Example:
        >>> fleet.init()
        >>> if fleet.is_server():
        ...     fleet.init_server()
        ...     fleet.run_server()
    """
    current().run_server()


def stop_worker() -> None:
    """Leave the job after a background save has finished; raises if the save failed.

    The end of the process calls it when the script does not; a second call does nothing.

    Raises:
        CheckpointError: a save in the background has failed.

    Example:
        >>> fleet.init()
        >>> fleet.stop_worker()
        >>> fleet.stop_worker()
    """
    job = current_or_none()
    if job is None:
        return
    local_training.warn_at_end(job)
    compression.warn_at_end(job)
    with contextlib.ExitStack() as ending:
        ending.callback(_leave, job)
        ending.callback(job.finish)
        job.background_save.finish()


def reset() -> None:
    """Leave the job, if there is one, and forget what was registered, so that `init` may follow.

    For notebooks. A job of several processes cannot be joined again: there `reset` is
    `stop_worker`, and the next `init` needs a new process.

    Raises:
        CheckpointError: a save in the background has failed.

    Example:
        >>> fleet.init()
        >>> fleet.reset()
        >>> fleet.init(is_collective=True)
    """
    try:
        stop_worker()
    finally:
        forget_last_job()
        if not _left:
            atexit.unregister(_leave_at_exit)
            remove_exit_hooks()


def _leave(job: Job) -> None:
    global _left
    set_current(None)
    _left = not job.group.alone
    job.closers.close()


def _close_models(job: Job) -> None:
    for model in job.models:
        model.close()


#: the last call of `fleet.init` that succeeded
_accepted: InitCall | None = None
#: True once this process has left a job of several workers
_left = False


def _leave_at_exit(pid: int, role: Role) -> None:
    job = current_or_none()
    # a forked child is no member of the job
    if os.getpid() != pid:
        return
    if job is None:
        if role.is_worker:
            report_exiting(role)
        return
    if job.autosave is None or not job.autosave.has_stopped:
        report_exiting(job.role)
    try:
        stop_worker()
    except FleetError as error:
        exit_with_error(error)


def _check_call(role_maker: object, is_collective: object, strategy: object) -> None:
    """Refuse an argument in the place of another."""
    expected = {
        "role_maker": (role_maker, RoleMaker),
        "is_collective": (is_collective, bool),
        "strategy": (strategy, DistributedStrategy),
    }
    for name, (value, kind) in expected.items():
        if (value is None and name != "is_collective") or isinstance(value, kind):
            continue
        meant = next((n for n, (_, k) in expected.items() if isinstance(value, k)), None)
        shown = repr(value) if isinstance(value, bool) else "..."
        instead = f"; write fleet.init({meant}={shown})" if meant else ""
        raise ConfigError(
            f"fleet.init: {name} is a {type(value).__name__}, expected a {kind.__name__}{instead}"
        )


def _refuse_after_leaving() -> None:
    if _left:
        raise ConfigError(
            "fleet.init after fleet.stop_worker or fleet.reset: this process has left its job, and "
            "the other workers do not wait for it again; start a new process"
        )


def _deadline(role: Role, strategy: DistributedStrategy) -> Deadline:
    if role.deadline_s is not None and not strategy.is_set("deadline_s"):
        return Deadline(role.deadline_s, role.deadline_variable or role.dialect)
    is_set = strategy.is_set("deadline_s")
    return Deadline(strategy.deadline_s, "the strategy" if is_set else "the default")


def _check_mode(role: Role, is_collective: bool) -> None:
    if is_collective and (role.join is not None or role.is_elastic):
        raise RoleError(
            "fleet.init(is_collective=True), but workers join and leave while a job runs only with "
            "parameter servers; call fleet.init(), or start the job with a fixed number of workers "
            "(without FLEET_WORKER_MAX and FLEET_JOIN)"
        )
    if is_collective and role.server_num:
        raise RoleError(
            f"fleet.init(is_collective=True), but the job has {role.server_num} parameter servers "
            f"({role.dialect}); start it without servers, or call fleet.init()"
        )


def _check_resume(role: Role, strategy: DistributedStrategy, is_collective: bool) -> None:
    """Refuse to resume a job that has saved nothing: it would restart silently."""
    saves = strategy.checkpoint or (strategy.durability != "none" and not is_collective)
    if role.must_resume and not saves:
        raise ConfigError(
            "--resume (FLEET_RESUME=1), but this job saves nothing to resume from: start it with "
            "fleetrun --checkpoint DIR (strategy.checkpoint), or, with parameter servers, set "
            "strategy.durability; or start from the beginning without --resume"
        )


def _warn_of_unsupported_variables(role: Role) -> None:
    """Warn once per job: the environment of all processes is usually the same."""
    if role.is_worker and not role.index:
        for sentence in unsupported_variables():
            logger.warning("%s", sentence)


def _configure_log(role: Role) -> None:
    name = role.kind.value if role.index is None else f"{role.kind.value} {role.index}"
    quiet = role.kind is Kind.WORKER and role.index not in (0, None)
    level = max(role.log_level, logging.WARNING) if quiet else role.log_level
    log.configure(name, level, output_variables())
