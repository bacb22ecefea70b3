# SPDX-License-Identifier: Apache-2.0
"""The share of time in which a job that loses processes makes progress; pure.

Failures are independent: each process fails on average once in `mtbf_s`. After a failure the engine
starts a process again, which takes `restart_s` until it is at work.
"""

from __future__ import annotations

import dataclasses
import math

from fleetlight.launch.capacity.profile import SYNC


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureModel:
    """How often processes fail, and what a failure costs."""

    #: mean time between failures of one process
    mtbf_s: float
    #: from a failure until the process is at work again, with the values of its log
    restart_s: float
    #: how long a save holds up the training
    save_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodput:
    """What is left of the speed of a job without failures."""

    #: failures of all processes in an hour
    failures_per_h: float
    #: with checkpoints alone, each failure restarts all processes from the last one
    with_checkpoints: float
    #: the time between two checkpoints that loses least
    checkpoint_every_s: float
    #: with `durability="log"`, each process resumes alone
    with_log: float


def goodput(workers: int, servers: int, mode: str, failures: FailureModel) -> Goodput:
    """The goodput of a job of this size in this mode."""
    between_s = failures.mtbf_s / (workers + servers)
    every_s = best_interval(between_s, failures)
    return Goodput(
        failures_per_h=3600 / between_s,
        with_checkpoints=_with_checkpoints(between_s, every_s, failures),
        checkpoint_every_s=every_s,
        with_log=_with_log(workers, servers, mode, failures),
    )


def best_interval(between_s: float, failures: FailureModel) -> float:
    """The time between checkpoints that loses least, by search; it is near sqrt(2 save between)."""
    guess = math.sqrt(2 * failures.save_s * between_s)
    candidates = [guess * 1.05**step for step in range(-60, 61)]
    return max(candidates, key=lambda every_s: _with_checkpoints(between_s, every_s, failures))


def _with_checkpoints(between_s: float, every_s: float, failures: FailureModel) -> float:
    """The share of time whose work is kept, where work since the last save is lost.

    A stretch of work and its save must pass without a failure. Its expected time is that of
    exponential failures (J. T. Daly, 2006).
    """
    exponent = (every_s + failures.save_s) / between_s
    if exponent > _MOST or failures.restart_s / between_s > _MOST:
        return 0.0
    expected_s = between_s * math.exp(failures.restart_s / between_s) * math.expm1(exponent)
    return every_s / expected_s


#: exponents beyond this mean that the job makes no progress
_MOST = 500.0


def _with_log(workers: int, servers: int, mode: str, failures: FailureModel) -> float:
    """The share of time in which a job works whose processes resume alone.

    Each step needs all servers. In sync mode it needs all workers, too; otherwise a lost worker
    leaves the others at work.
    """
    away = failures.restart_s / failures.mtbf_s
    needed = servers + (workers if mode == SYNC else 0)
    worker_share = 1.0 if mode == SYNC else 1 / (1 + away)
    return worker_share / (1 + needed * away)
