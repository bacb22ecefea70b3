# SPDX-License-Identifier: Apache-2.0
"""`PublishOptions`: what `fleet.publish` was asked for. Pure data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.publication.manifest import F32, FORMS


@dataclasses.dataclass(frozen=True)
class PublishOptions:
    """What is published, where, and how often."""

    url: str
    every_s: float = 60.0
    #: the form of rows in files: one, or by name of the table
    rows: str | Mapping[str, str] = F32
    #: names of tables; None: all
    tables: Sequence[str] | None = None
    #: a base replaces deltas that have this share of its bytes
    compact_at: float = 0.5
    #: how long a file stays that no manifest names
    grace_s: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("every_s", 0.0), ("compact_at", 0.0), ("grace_s", 0.0)):
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and math.isfinite(value)
            if not good or value < least or (name == "every_s" and not value):
                raise ConfigError(f"fleet.publish: got {name}={value!r}, expected a number above 0")
        for form in [self.rows] if isinstance(self.rows, str) else self.rows.values():
            if form not in FORMS:
                raise ConfigError(f"fleet.publish: got rows={form!r}; {did_you_mean(form, FORMS)}")

    def forms(self, names: Sequence[str]) -> dict[int, str]:
        """By number of each table to publish: the form of its rows."""
        wanted = names if self.tables is None else self.tables
        by_name = dict.fromkeys(names, self.rows) if isinstance(self.rows, str) else self.rows
        for name in [*wanted, *([] if isinstance(self.rows, str) else self.rows)]:
            if name not in names:
                known = did_you_mean(name, names) if names else "this model has no tables"
                raise ConfigError(f"fleet.publish: there is no table {name!r}; {known}")
        return {
            number: by_name.get(name, F32) for number, name in enumerate(names) if name in wanted
        }
