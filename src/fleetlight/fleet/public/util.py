# SPDX-License-Identifier: Apache-2.0
"""`fleet.util`: the functions of Fleet's `util`, with its signatures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.fleet.job import current
from fleetlight.fleet.public import collectives
from fleetlight.observe.log import logger

__all__ = ["all_gather", "all_reduce", "barrier", "get_file_shard", "print_on_rank"]

#: Fleet's values of `comm_world`; here only workers talk to each other
_WORLDS = ("worker", "server", "all")


def all_reduce(input: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
    """`fleet.all_reduce` under Fleet's name; a list of numbers is returned as an array.

    Args:
        input: this worker's value: a tensor, an array, a number or a list of numbers.
        mode: `"sum"`, `"max"` or `"min"`.
        comm_world: `"worker"`; servers take part in no such operation.

    Returns:
        The reduced value on every worker.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.util.all_reduce([1.0, 2.0])
        array([1., 2.])
    """
    _check_world("all_reduce", comm_world)
    return collectives.all_reduce(_as_array(input), mode)


def all_gather(input: Any, comm_world: str = "worker") -> list[Any]:
    """`fleet.all_gather` under Fleet's name; a list of numbers becomes an array.

    Args:
        input: this worker's value: a tensor, an array, a number or a list of numbers.
        comm_world: `"worker"`.

    Returns:
        A list with one value for each worker.

    Raises:
        ConfigError: an argument is wrong.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.util.all_gather(7)
        [7]
    """
    _check_world("all_gather", comm_world)
    return collectives.all_gather(_as_array(input))


def barrier(comm_world: str = "worker") -> None:
    """`fleet.barrier_worker` under Fleet's name.

    Args:
        comm_world: `"worker"`.

    Raises:
        ConfigError: `comm_world` is another one.
        DeadlineError: a worker did not arrive in time.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.util.barrier()
    """
    _check_world("barrier", comm_world)
    collectives.barrier_worker()


def print_on_rank(message: object, rank_id: int) -> None:
    """Print a line in one worker.

    Args:
        message: what to print.
        rank_id: the index of the worker that prints.

    Raises:
        ConfigError: the job has no such worker.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.util.print_on_rank("epoch 1", 0)
        epoch 1
    """
    group, places = current().group, current().role.places
    if not 0 <= rank_id < places:
        raise ConfigError(
            f"print_on_rank: got rank_id={rank_id}, expected a worker, 0 to {places - 1}"
        )
    if group.index == rank_id:
        sys.stdout.write(f"{message}\n")


def get_file_shard(files: Sequence[str]) -> list[str]:
    """This worker's files, a contiguous part of the list; the parts differ by one file at most.

    Args:
        files: the names of all files, the same on every worker.

    Returns:
        The names of this worker's files.

    Raises:
        ConfigError: `files` is a string, or workers may join and leave.

    Example:
        >>> fleet.init(is_collective=True)
        >>> fleet.util.get_file_shard(["part-0", "part-1"])
        ['part-0', 'part-1']
    """
    if isinstance(files, str):
        raise ConfigError(f"get_file_shard: got the string {files!r}, expected a list of names")
    if current().role.is_elastic:
        raise ConfigError(
            "get_file_shard: workers may join and leave while this job runs, so no worker has a "
            "fixed part of the files; use fleet.shard(loader, deal='queue')"
        )
    group = current().group
    share, extra = divmod(len(files), group.size)
    start = group.index * share + min(group.index, extra)
    mine = list(files[start : start + share + (group.index < extra)])
    if not mine:
        logger.warning(
            "worker %d of %d gets no file: the list has only %d",
            group.index,
            group.size,
            len(files),
        )
    return mine


def _as_array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, (list, tuple)) else value


def _check_world(operation: str, comm_world: str) -> None:
    if comm_world == "worker":
        return
    if comm_world in _WORLDS:
        raise ConfigError(
            f"{operation}: got comm_world={comm_world!r}, expected 'worker': servers reply to "
            "workers and send each other nothing"
        )
    raise ConfigError(
        f"{operation}: got comm_world={comm_world!r}; {did_you_mean(str(comm_world), _WORLDS)}"
    )


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *__all__})


if not TYPE_CHECKING:  # mypy must see the names above only

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module 'fleetlight.fleet.public.util' has no attribute {name!r}")
        raise AttributeError(f"fleet.util has no {name!r}; {did_you_mean(name, __all__)}")
