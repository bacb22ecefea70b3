# SPDX-License-Identifier: Apache-2.0
"""Why a checkpoint does not fit: the first difference by name, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from fleetlight.errors import CheckpointError

Fact = TypeVar("Fact")


def refuse_differences(what: str, differences: Sequence[str]) -> None:
    """Raise when there is any difference, before anything was changed."""
    if not differences:
        return
    more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
    raise CheckpointError(
        f"the checkpoint does not fit {what}: {differences[0]}{more}; nothing was loaded. "
        f"Build the same {what} as when it was saved"
    )


def compare(got: Mapping[str, Fact], saved: Mapping[str, Fact], noun: str) -> Iterator[str]:
    """The differences between what is here and what was saved, in the order of what is here."""
    for name, fact in got.items():
        if name not in saved:
            yield f"{noun} {name!r} is not in the checkpoint"
        elif fact != saved[name]:
            yield f"{noun} {name!r} is {fact} here, but {saved[name]} in the checkpoint"
    for name in saved:
        if name not in got:
            yield f"{noun} {name!r} of the checkpoint does not exist here"
