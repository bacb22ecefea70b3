# SPDX-License-Identifier: Apache-2.0
"""`Feature`: one group of settings with its effects, its conflicts and its checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

from fleetlight.errors import StrategyError
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Settings

#: each raises a StrategyError where a job cannot do what the strategy asks for
Checks: TypeAlias = tuple[Callable[[Any, JobFacts], None], ...]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A setting that is on, or that has one of the values named here."""

    path: str
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        return self.path + (f" = {' or '.join(map(repr, self.values))}" if self.values else "")

    def holds(self, strategy: Settings) -> bool:
        """True where the strategy chooses it; a field of a nested config needs its switch."""
        config = self.path.rpartition(".")[0]
        if config and not Chosen(config.removesuffix("_configs")).holds(strategy):
            return False
        value = strategy[self.path]
        if self.values:
            return value in self.values
        return value is not False and value is not None and value != "none"


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Two choices that cannot both hold, and why."""

    first: Chosen
    second: Chosen
    why: str

    def check(self, strategy: Settings) -> None:
        """Raise if the strategy makes both choices."""
        if self.first.holds(strategy) and self.second.holds(strategy):
            raise StrategyError(
                f"strategy.{self.first} and strategy.{self.second} exclude each other: {self.why}; "
                "leave one out"
            )


Conflicts: TypeAlias = tuple[Conflict, ...]


class Feature(Settings):
    """A base of `DistributedStrategy`: some of its fields, and all that is known of them.

    Each field names its effect. `strategy["name"]` reads a field of another feature.
    """

    #: with settings of this feature or of others; each pair stands in one feature
    CONFLICTS: ClassVar[Conflicts] = ()
    CHECKS: ClassVar[Checks] = ()


def check(strategy: Feature, job: JobFacts) -> None:
    """Raise for the first conflict of two settings, then for what this job cannot do."""
    for conflict in _of_all(strategy, "CONFLICTS"):
        conflict.check(strategy)
    for check_job in _of_all(strategy, "CHECKS"):
        check_job(strategy, job)


def _of_all(strategy: Feature, name: str) -> Iterator[Any]:
    """What each feature of a strategy has under a name, in the order of their fields."""
    for feature in reversed(type(strategy).__mro__):
        yield from vars(feature).get(name, ())
