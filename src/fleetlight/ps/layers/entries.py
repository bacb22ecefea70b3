# SPDX-License-Identifier: Apache-2.0
"""What a user says about which ids get a row that is trained."""

from __future__ import annotations

from fleetlight.errors import ConfigError
from fleetlight.ps.plan import EntryPlan


class EntryPolicy:
    """Base of the entries; `plan` is what servers and workers agree on."""

    plan: EntryPlan

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan.value:g})"


class CountFilterEntry(EntryPolicy):
    """A row is trained only once its id has been seen `count` times."""

    def __init__(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"CountFilterEntry: got {count!r}, expected a positive integer")
        self.plan = EntryPlan("count", float(count))


class ProbabilityEntry(EntryPolicy):
    """Each time an unknown id is seen, it gets a row by this chance."""

    def __init__(self, probability: float) -> None:
        if not isinstance(probability, (int, float)) or not 0 < probability <= 1:
            raise ConfigError(f"ProbabilityEntry: got {probability!r}, expected 0 < p <= 1")
        self.plan = EntryPlan("probability", float(probability))


class ShowClickEntry(EntryPolicy):
    """How often an id was shown and clicked is counted, for `fleet.shrink` to decide by.

    The numbers come with the lookup: `embedding(ids, show=..., click=...)`. The two names are those
    of Fleet, and only shown.
    """

    def __init__(self, show_name: str = "show", click_name: str = "click") -> None:
        for name in (show_name, click_name):
            if not isinstance(name, str):
                raise ConfigError(f"ShowClickEntry: got {name!r}, expected two names")
        self.names = (show_name, click_name)
        self.plan = EntryPlan("show_click")

    def __repr__(self) -> str:
        return f"ShowClickEntry{self.names!r}"
