# SPDX-License-Identifier: Apache-2.0
"""The admission rules that a user can set for a table."""

from __future__ import annotations

from fleetlight.errors import ConfigError
from fleetlight.ps.plan import SCORE, SHOW_CLICK, EntryPlan


class EntryPolicy:
    """Base of the entries; `plan` is the entry's form in the plan of the job."""

    plan: EntryPlan

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan.value:g})"


class CountFilterEntry(EntryPolicy):
    """Trains a row only after its id has occurred `count` times.

    Args:
        count: how often an id must occur.

    Raises:
        ConfigError: `count` is no positive integer.

    Example:
        >>> fleet.nn.SparseEmbedding(8, entry=fleet.CountFilterEntry(10)).entry
        CountFilterEntry(10)
    """

    def __init__(self, count: int) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"CountFilterEntry: got {count!r}, expected a positive integer")
        self.plan = EntryPlan("count", float(count))


class ProbabilityEntry(EntryPolicy):
    """Inserts a row for an unknown id with this probability at each occurrence.

    Args:
        probability: above 0, at most 1.

    Raises:
        ConfigError: `probability` is out of range.

    Example:
        >>> fleet.nn.SparseEmbedding(8, entry=fleet.ProbabilityEntry(0.1)).entry
        ProbabilityEntry(0.1)
    """

    def __init__(self, probability: float) -> None:
        if not isinstance(probability, (int, float)) or not 0 < probability <= 1:
            raise ConfigError(f"ProbabilityEntry: got {probability!r}, expected 0 < p <= 1")
        self.plan = EntryPlan("probability", float(probability))


class ScoreEntry(EntryPolicy):
    """Trains a row only after its id has a score in another table, from its shows and clicks.

    The score is 0.1 * (shows - clicks) + clicks. That table, with a `ShowClickEntry`, has a weight
    for each id from the first use on; this one saves the memory of long rows for rare ids. A row
    leaves with the one of the other table.

    Args:
        score: the lowest score that an id needs.
        table: the name of the table that counts.

    Raises:
        ConfigError: `score` is not above 0, or `table` is no name.

    Example:
        >>> wide = fleet.nn.SparseEmbedding(1, table="wide", entry=fleet.ShowClickEntry())
        >>> deep = fleet.nn.SparseEmbedding(8, entry=fleet.ScoreEntry(1.5, "wide"))
        >>> deep.entry
        ScoreEntry(1.5, 'wide')
    """

    def __init__(self, score: float, table: str) -> None:
        if not isinstance(score, (int, float)) or isinstance(score, bool) or not score > 0:
            raise ConfigError(f"ScoreEntry: got score={score!r}, expected a number above 0")
        if not isinstance(table, str) or not table:
            raise ConfigError(
                f"ScoreEntry: got table={table!r}, expected the name of a table whose layer has "
                "entry=fleet.ShowClickEntry()"
            )
        self.plan = EntryPlan(SCORE, float(score), table)

    def __repr__(self) -> str:
        return f"ScoreEntry({self.plan.value:g}, {self.plan.table!r})"


class ShowClickEntry(EntryPolicy):
    """Counts shows and clicks of each id, which `fleet.shrink` uses to remove rows.

    The lookup takes the numbers: `embedding(ids, show=..., click=...)`. The two names exist for
    compatibility with Fleet and are only shown.

    Args:
        show_name: a name for the shows.
        click_name: a name for the clicks.

    Raises:
        ConfigError: a name is no string.

    Example:
        >>> fleet.init()
        >>> layer = fleet.nn.SparseEmbedding(2, entry=fleet.ShowClickEntry())
        >>> model = fleet.distributed_model(layer)
        >>> ids = torch.tensor([7, 9])
        >>> model(ids, show=torch.tensor([1.0, 1.0]), click=torch.tensor([0.0, 1.0])).shape
        torch.Size([2, 2])
    """

    def __init__(self, show_name: str = "show", click_name: str = "click") -> None:
        for name in (show_name, click_name):
            if not isinstance(name, str):
                raise ConfigError(f"ShowClickEntry: got {name!r}, expected two names")
        self.names = (show_name, click_name)
        self.plan = EntryPlan(SHOW_CLICK)

    def __repr__(self) -> str:
        return f"ShowClickEntry{self.names!r}"
