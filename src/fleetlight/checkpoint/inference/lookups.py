# SPDX-License-Identifier: Apache-2.0
"""Programs that take the rows of their lookups as an input.

A model with rows in tables becomes two modules: `IdsOf` returns the ids of each lookup, and
`WithRows` takes their rows and returns what the model returns. So neither has a table, and both
are plain graphs of torch.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from fleetlight.errors import CheckpointError

#: what the name of a parameter of the model begins with in the state of `WithRows`
PREFIX = "model."
_take: contextvars.ContextVar[Callable[[str, int, Tensor], Tensor]] = contextvars.ContextVar("take")


class LookupEntry(msgspec.Struct, frozen=True):
    """One lookup of a model."""

    table: str
    dim: int
    #: how many ids it has for each record of a batch; None: as many as the example had
    per_record: int | None


class TakenRows(nn.Module):
    """In a model: the rows of one table, which come from outside."""

    def __init__(self, table: str, dim: int) -> None:
        super().__init__()
        self._table, self._dim = table, dim

    def forward(self, ids: Tensor) -> Tensor:
        """A row for each id of a 1-D tensor."""
        return _take.get()(self._table, self._dim, ids)


class IdsOf(nn.Module):
    """Returns the ids of each lookup of a model, in the order of the lookups."""

    def __init__(self, model: nn.Module, names: Sequence[str] | None) -> None:
        """`names`: of the model's inputs, if it takes them by name."""
        super().__init__()
        self.model, self._names = model, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs are those of the model."""
        found: list[Tensor] = []

        def take(table: str, dim: int, ids: Tensor) -> Tensor:
            found.append(ids)
            return ids.new_zeros((ids.shape[0], dim), dtype=torch.float32)

        with _taking(take):
            _called(self.model, inputs, self._names)
        return tuple(found)


class WithRows(nn.Module):
    """A model that takes the rows of each lookup, in order, before its inputs."""

    def __init__(self, model: nn.Module, names: Sequence[str] | None) -> None:
        """`names`: of the model's inputs, if it takes them by name."""
        super().__init__()
        self.model, self._names = model, names

    def forward(self, rows: Sequence[Tensor], *inputs: Tensor) -> Any:
        """What the model returns."""
        left = list(rows)

        def take(table: str, dim: int, ids: Tensor) -> Tensor:
            return left.pop(0)

        with _taking(take):
            return _called(self.model, inputs, self._names)


def lookups_of(
    model: nn.Module,
    examples: Mapping[str, Tensor],
    names: Sequence[str] | None,
    batched: Sequence[str],
) -> list[LookupEntry]:
    """The lookups of a model, in order; `batched` inputs have a batch as first dimension."""
    found = _looked_up(model, examples, names, 0.5)
    other = _looked_up(model, examples, names, -0.5)
    for (table, dim, ids), (_, _, again) in zip(found, other, strict=True):
        if not torch.equal(ids, again):
            raise CheckpointError(
                f"the ids of a lookup in table {table!r} (rows of {dim}) depend on rows of another "
                "lookup; such a model has no program that takes rows. Export it with rows='all'"
            )
    if not batched:
        return [LookupEntry(table, dim, None) for table, dim, _ in found]
    batch = examples[batched[0]].shape[0]
    twice = {
        name: torch.cat([value, value]) if name in batched else value
        for name, value in examples.items()
    }
    more = _looked_up(model, twice, names, 0.5)
    return [
        LookupEntry(table, dim, _per_record(len(ids), len(double), batch))
        for (table, dim, ids), (_, _, double) in zip(found, more, strict=True)
    ]


def example_rows(ids: Sequence[Tensor], lookups: Sequence[LookupEntry]) -> tuple[Tensor, ...]:
    """Rows of these ids."""
    return tuple(
        one.new_zeros((len(one), entry.dim), dtype=torch.float32)
        for one, entry in zip(ids, lookups, strict=True)
    )


def _per_record(count: int, double: int, batch: int) -> int | None:
    return count // batch if count % batch == 0 and double == 2 * count else None


def _looked_up(
    model: nn.Module, examples: Mapping[str, Tensor], names: Sequence[str] | None, value: float
) -> list[tuple[str, int, Tensor]]:
    """Table, dimension and ids of each lookup, where all rows have one value."""
    found: list[tuple[str, int, Tensor]] = []

    def take(table: str, dim: int, ids: Tensor) -> Tensor:
        found.append((table, dim, ids.clone()))
        return ids.new_full((ids.shape[0], dim), value, dtype=torch.float32)

    with _taking(take), torch.no_grad():
        _called(model, list(examples.values()), names)
    return found


def _called(model: nn.Module, inputs: Sequence[Tensor], names: Sequence[str] | None) -> Any:
    """Call a model by position or by name."""
    if names is None:
        return model(*inputs)
    return model(**dict(zip(names, inputs, strict=True)))


@contextlib.contextmanager
def _taking(take: Callable[[str, int, Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, `TakenRows` calls a function."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)
