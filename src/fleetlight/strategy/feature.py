# SPDX-License-Identifier: Apache-2.0
"""`Feature`: a group of settings with its effects, conflicts and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

from fleetlight.errors import StrategyError
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Settings

#: each raises a StrategyError if the job cannot do what the strategy asks for
Checks: TypeAlias = tuple[Callable[[Any, JobFacts], None], ...]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A setting that is on, or that has one of `values`."""

    path: str
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        return self.path + (f" = {' or '.join(map(repr, self.values))}" if self.values else "")

    def holds(self, strategy: Settings) -> bool:
        """True if the strategy chooses this; a nested field also needs its switch."""
        config = self.path.rpartition(".")[0]
        if config and not Chosen(config.removesuffix("_configs")).holds(strategy):
            return False
        value = strategy[self.path]
        if self.values:
            return value in self.values
        return value is not False and value is not None and value != "none"


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Two choices that exclude each other, and why."""

    first: Chosen
    second: Chosen
    why: str

    def check(self, strategy: Settings) -> None:
        """Raise StrategyError if the strategy makes both choices."""
        if self.first.holds(strategy) and self.second.holds(strategy):
            raise StrategyError(
                f"strategy.{self.first} and strategy.{self.second} exclude each other: {self.why}; "
                "choose one"
            )


Conflicts: TypeAlias = tuple[Conflict, ...]


class Feature(Settings):
    """A base of `DistributedStrategy`: some of its fields, with their effects.

    `strategy["name"]` reads a field of another feature.
    """

    #: conflicts between settings of this feature, or with others; each pair is in one feature
    CONFLICTS: ClassVar[Conflicts] = ()
    CHECKS: ClassVar[Checks] = ()


def check(strategy: Feature, job: JobFacts) -> None:
    """Raise StrategyError for the first conflict or failed check."""
    for conflict in _all_items(strategy, "CONFLICTS"):
        conflict.check(strategy)
    for check_job in _all_items(strategy, "CHECKS"):
        check_job(strategy, job)


def _all_items(strategy: Feature, name: str) -> Iterator[Any]:
    """The items of a class attribute of all features, in the order of their fields."""
    for feature in reversed(type(strategy).__mro__):
        yield from vars(feature).get(name, ())
