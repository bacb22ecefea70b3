# SPDX-License-Identifier: Apache-2.0
"""The cost of communication: measured by `collective_perf`, and counted during training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fleetlight.collective.communication_cost import CommunicationCost
from fleetlight.collective.group import Group
from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.fleet.job import current
from fleetlight.observe.log import logger
from fleetlight.torch_compat.c10d import reduce_scatter_single

#: bytes: from a size where latency dominates to one where bandwidth does
DEFAULT_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
#: about how long one size may take, and its smallest number of rounds
_BUDGET_S, _MIN_ROUNDS = 5.0, 3

Operation = Callable[[Group, Tensor], None]


def account() -> CommunicationCost:
    """The cost of communication in this worker, since its first step.

    Returns:
        A record with `steps`, `seconds`, `waited_s` (waiting for other workers), `sent_bytes`
        (which left this host; None on one host) and `interface`.

    Raises:
        ConfigError: the job has parameter servers.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.account().steps
        0
    """
    return _group("account").meter.cost()


def collective_perf(
    comm_type: str, round: int = 50, size_and_time: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Measure a collective operation among all workers; every worker calls it.

    Args:
        comm_type: `"allreduce"`, `"broadcast"`, `"allgather"` or `"reduce_scatter"`.
        round: the most rounds of each size.
        size_and_time: sizes in bytes, and the seconds that each may take; a slower one is a
            warning.

    Returns:
        The median of the seconds by size, equal on all workers.

    Raises:
        ConfigError: an argument is wrong, or the job has parameter servers.

    Example:
        >>> fleet.init(is_collective=True)
        >>> measured = fleet.collective_perf("allreduce", round=3, size_and_time={4096: 1.0})
        >>> list(measured)
        [4096]
    """
    group = _group("collective_perf")
    if size_and_time is not None and not isinstance(size_and_time, Mapping):
        raise ConfigError(
            f"collective_perf: size_and_time is a {type(size_and_time).__name__}, expected a "
            "mapping of bytes to seconds, such as {1 << 20: 0.1}"
        )
    expected = dict.fromkeys(DEFAULT_SIZES, math.inf) if not size_and_time else dict(size_and_time)
    _check(comm_type, round, expected)
    _check_same(group, json.dumps([comm_type, round, list(expected)]))
    operation = _OPERATIONS[comm_type.replace("_", "")]
    measured = {size: _measure(group, operation, size, round) for size in expected}
    if group.index == 0:
        _report(comm_type, measured, expected)
    return measured


def _group(name: str) -> Group:
    job = current()
    group = job.collective_group
    if group is None:
        raise ConfigError(
            f"fleet.{name} is for collective jobs; a job with parameter servers logs at its end "
            "what its workers have sent, and how long they have waited"
        )
    return group


def _all_reduce(group: Group, values: Tensor) -> None:
    group.all_reduce(values)


def _broadcast(group: Group, values: Tensor) -> None:
    group.broadcast([values], "collective_perf")


def _all_gather(group: Group, values: Tensor) -> None:
    group.all_gather(values.chunk(group.size)[group.index])


def _reduce_scatter(group: Group, values: Tensor) -> None:
    (workers,) = group.communicators(1)
    part = torch.empty_like(values.chunk(group.size)[group.index])
    with group.named("reduce_scatter"):
        reduce_scatter_single(part, values, workers)


_OPERATIONS: dict[str, Operation] = {
    "allreduce": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "reducescatter": _reduce_scatter,
}


def _check(comm_type: object, rounds: object, expected: Mapping[int, float]) -> None:
    known = ["allreduce", "broadcast", "allgather", "reduce_scatter"]
    if not isinstance(comm_type, str) or comm_type.replace("_", "") not in _OPERATIONS:
        raise ConfigError(
            f"collective_perf: got comm_type={comm_type!r}; {did_you_mean(str(comm_type), known)}"
        )
    if type(rounds) is not int or rounds < 1:
        raise ConfigError(
            f"collective_perf: got round={rounds!r}, expected an integer of 1 or more"
        )
    for size, seconds in expected.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"collective_perf: got size {size!r}, expected a number of bytes")
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ConfigError(
                f"collective_perf: got {seconds!r} for {size} bytes, expected seconds above 0"
            )


def _check_same(group: Group, call: str) -> None:
    """ConfigError unless all workers measure the same: they would wait for each other forever."""
    for index, other in enumerate(group.gather_bytes(call.encode(), "collective_perf")):
        if other.decode() != call:
            raise ConfigError(
                f"collective_perf: worker {group.index} measures {call}, worker {index} "
                f"{other.decode()}; call it with the same arguments everywhere"
            )


def _measure(group: Group, operation: Operation, size: int, rounds: int) -> float:
    """The median time of the rounds on the slowest worker."""
    if group.alone:
        return 0.0
    # float32 values, equally many for each worker
    each = -(-size // (4 * group.size))
    values = torch.zeros(each * group.size, device=group.device)
    first = max(_round(group, operation, values) for _ in range(2))
    rounds = min(rounds, max(_MIN_ROUNDS, int(_BUDGET_S / _longest(group, first))))
    taken = [_round(group, operation, values) for _ in range(rounds)]
    return _longest(group, sorted(taken)[len(taken) // 2])


def _round(group: Group, operation: Operation, values: Tensor) -> float:
    group.barrier("collective_perf")
    begin = time.perf_counter()
    operation(group, values)
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    return time.perf_counter() - begin


def _longest(group: Group, seconds: float) -> float:
    return float(group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def _report(comm_type: str, measured: Mapping[int, float], expected: Mapping[int, float]) -> None:
    times = ", ".join(f"{_size(size)} {_time(taken)}" for size, taken in measured.items())
    logger.info("collective_perf: %s: %s", comm_type, times)
    for size, taken in measured.items():
        if taken > expected[size]:
            logger.warning(
                "collective_perf: %s of %s takes %s, more than the %s expected",
                *(comm_type, _size(size), _time(taken), _time(expected[size])),
            )


def _size(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
