# SPDX-License-Identifier: Apache-2.0
"""Parts of messages: counts, lists of names, and the names nearest to a misspelled one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: advice where a wait has expired although the awaited processes may be alive
RAISE_DEADLINE = (
    "if they need longer, raise the deadline: DistributedStrategy(deadline_s=...) given to "
    "fleet.init, or FLEET_DEADLINE_S"
)

#: a longer list of names does not help on one line
_MANY = 20


def did_you_mean(
    name: str, known: Iterable[str], listed: Iterable[str] | None = None, *, elsewhere: str = ""
) -> str:
    """A sentence with the names nearest to `name`, or with all names (or `listed`) if none is near.

    `elsewhere` says where to find all names, in place of a long list.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    if elsewhere and len(names) > _MANY:
        return f"none of the {len(names)} known names is near; {elsewhere}"
    return "known names: " + ", ".join(names if listed is None else listed)


def counted(number: int, noun: str, separator: str = "") -> str:
    """`1 worker`, `2 workers`; with a separator `2,374 workers`."""
    return f"{number:{separator}} {noun}{'' if number == 1 else 's'}"


def first_names(names: Sequence[str], most: int) -> str:
    """The first names, and the number of the others: `a, b and 3 more`."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: a misspelled keyword raises a TypeError with the nearest names."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    known = {one.name for one in parameters if one.kind in kinds}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= known:
            wrong = next(name for name in kwargs if name not in known)
            made = args and function.__name__ == "__init__"
            name = type(args[0]).__name__ if made else function.__qualname__
            raise TypeError(
                f"{name}() got an unexpected keyword argument {wrong!r}; "
                f"{did_you_mean(wrong, known - {'self'})}"
            )
        return function(*args, **kwargs)

    return call
