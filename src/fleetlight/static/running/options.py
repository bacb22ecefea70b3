# SPDX-License-Identifier: Apache-2.0
"""Options of runs."""

from __future__ import annotations

import dataclasses

import torch

from fleetlight.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of a program; its executor may override them."""

    #: a training program computes fetches in every n-th run
    fetch_frequency: int = 1
    #: threads of an operator during a run; None: torch's number
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= 1):
                raise ConfigError(f"{name}: got {value!r}, expected a whole number above 0")

    def changed(self, fetch_frequency: int | None, num_threads: int | None) -> RunOptions:
        """The options with the arguments that are not None."""
        if fetch_frequency is None and num_threads is None:
            return self
        given = {"fetch_frequency": fetch_frequency, "num_threads": num_threads}
        changes = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(self, **changes) if changes else self


class Threads:
    """Inside the block, operators use `count` threads; None: torch's number."""

    def __init__(self, count: int | None) -> None:
        self._count, self._before = count, None if count is None else torch.get_num_threads()

    def __enter__(self) -> None:
        if self._count is not None and self._count != self._before:
            torch.set_num_threads(self._count)

    def __exit__(self, *_: object) -> None:
        if self._before is not None and self._count != self._before:
            torch.set_num_threads(self._before)
