# SPDX-License-Identifier: Apache-2.0
"""`Condition`: which records are read, decided by the statistics of a group where possible."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fleetlight.data.columns import arrow
from fleetlight.data.columns.files.group_file import Bounds
from fleetlight.errors import ConfigError

#: what `where=` takes: a column, an operation and a value; all must be true
Where = Sequence[tuple[str, str, Any]]
_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ARROW = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


@dataclasses.dataclass(frozen=True)
class Condition:
    """A record is read where this is true of its column; a missing value never is."""

    column: str
    operation: str
    value: Any

    def __post_init__(self) -> None:
        if self.operation not in (*_COMPARE, "in", "not in"):
            known = ", ".join([*_COMPARE, "in", "not in"])
            raise ConfigError(
                f"where: got the operation {self.operation!r} for {self.column!r}, expected one of "
                f"{known}"
            )
        if self.operation in ("in", "not in") and isinstance(self.value, str):
            raise ConfigError(
                f"where: {self.column!r} {self.operation} {self.value!r}: got a text, expected a "
                "list of values"
            )

    def decide(self, bounds: Bounds) -> bool | None:
        """True or False for all records of a group; None where it differs or is unknown."""
        if self.column not in bounds:
            return None
        low, high, has_missing = bounds[self.column]
        try:
            found = self._within(low, high)
        except TypeError:
            return None
        if isinstance(low, float) and found == (self.operation not in ("!=", "not in")):
            # statistics leave out NaN, for which the others are false and these two are true
            return None
        return None if found and has_missing else found

    def _within(self, low: Any, high: Any) -> bool | None:
        value = self.value
        values = value if self.operation in ("in", "not in") else [value]
        # a TypeError for values of another type, which are equal to none
        are_outside = [bool(one < low or one > high) for one in values]
        if low == high:
            if self.operation in ("in", "not in"):
                return bool((low in value) == (self.operation == "in"))
            return bool(_COMPARE[self.operation](low, value))
        if self.operation in ("<", "<=", ">", ">="):
            both = {bool(_COMPARE[self.operation](end, value)) for end in (low, high)}
            return both.pop() if len(both) == 1 else None
        if all(are_outside):
            return self.operation in ("!=", "not in")
        return None

    def mask(self, column: Any) -> Any:
        """For each record of an Arrow column, whether it is read."""
        pc, pa = arrow("pyarrow.compute"), arrow()
        try:
            if self.operation in _ARROW:
                found = getattr(pc, _ARROW[self.operation])(column, pa.scalar(self.value))
            else:
                found = pc.is_in(column, pa.array(list(self.value)))
                found = found if self.operation == "in" else pc.invert(found)
                found = pc.and_(found, pc.is_valid(column))
        except pa.ArrowException as error:
            raise ConfigError(
                f"where: {self.column!r} {self.operation} {self.value!r} does not fit "
                f"{column.type} ({str(error).splitlines()[0]})"
            ) from error
        return pc.fill_null(found, fill_value=False)


def conditions_of(where: Where | None) -> list[Condition]:
    """The conditions that a user gave."""
    try:
        given = [(column, operation, value) for column, operation, value in where or ()]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"where={where!r}: expected a list of (column, operation, value)"
        ) from error
    return [Condition(name, how, _kept(how, value)) for name, how, value in given]


def _kept(operation: str, value: Any) -> Any:
    """A list of values that can be read more than once."""
    is_list = operation in ("in", "not in") and not isinstance(value, str)
    return tuple(value) if is_list and isinstance(value, Iterable) else value


def mask_of(conditions: Sequence[Condition], table: Any) -> Any:
    """For each record of a table, whether it is read."""
    masks = [one.mask(table.column(one.column)) for one in conditions]
    return functools.reduce(arrow("pyarrow.compute").and_, masks)
