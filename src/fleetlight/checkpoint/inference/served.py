# SPDX-License-Identifier: Apache-2.0
"""A program with the rows and dense values of the newest publication."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.checkpoint.inference.lookups import PREFIX, LookupEntry
from fleetlight.errors import ConfigError


class RowView(Protocol):
    """The rows and dense values of one publication; `serve.ModelView` implements it."""

    @property
    def number(self) -> int:
        """The number of the publication."""

    @property
    def tables(self) -> Mapping[str, int]:
        """The number of values in a row of each table."""

    @property
    def dense(self) -> Mapping[str, NDArray[Any]]:
        """The dense values by name."""

    def lookup(self, table: str, ids: Any) -> NDArray[Any]:
        """The row of each id."""


class RowReader(Protocol):
    """Follows publications; `serve.Reader` implements it."""

    @property
    def view(self) -> RowView:
        """The newest publication."""


class Runnable(Protocol):
    """A program that takes rows and runs with the dense values of any publication."""

    def __call__(self, view: RowView, rows: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Run with the dense values of a publication."""


class ServedProgram:
    """Each call has the rows and dense values of one publication."""

    def __init__(
        self,
        ids: Callable[..., Sequence[Tensor]],
        program: Runnable,
        lookups: Sequence[LookupEntry],
        reader: RowReader,
    ) -> None:
        """`ids` returns the ids of each lookup."""
        self._ids, self._program, self._lookups, self._reader = ids, program, lookups, reader
        _check_tables(lookups, reader.view)

    def __call__(self, *inputs: Tensor) -> Any:
        """Look the rows up, and run."""
        view = self._reader.view
        found = self._ids(*inputs)
        rows = [
            torch.from_numpy(view.lookup(entry.table, ids.cpu().numpy())).to(ids.device)
            for entry, ids in zip(self._lookups, found, strict=True)
        ]
        return self._program(view, rows, inputs)


class InterpretedProgram:
    """A module of torch for each publication; its parameters share no memory with the next one."""

    def __init__(self, make: Callable[[], nn.Module], prefix: str) -> None:
        """`make` returns a new module each time; their values may share memory."""
        self._make, self._prefix = make, prefix
        self._now: tuple[int, nn.Module] | None = None
        self._renewing = threading.Lock()

    def __call__(self, view: RowView, rows: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """See `Runnable`."""
        return self._of(view)(tuple(rows), *inputs)

    def _of(self, view: RowView) -> nn.Module:
        """The module with the dense values of a publication."""
        now = self._now
        if now is None or now[0] != view.number:
            with self._renewing:
                now = self._now
                if now is None or now[0] != view.number:
                    module = self._make()
                    _set_values(module, view, self._prefix)
                    now = self._now = view.number, module
        return now[1]


def new_values(
    state: Mapping[str, Tensor], view: RowView, prefix: str, device: torch.device | None = None
) -> dict[str, Tensor]:
    """The values of a publication for a program's state, on a device or where the state is.

    `prefix`: what their names begin with in publications.
    """
    found = {}
    for name, value in state.items():
        plain = prefix + name.removeprefix(PREFIX)
        if plain not in view.dense and not isinstance(value, nn.Parameter):
            # a buffer that the model does not save
            continue
        if plain not in view.dense:
            raise ConfigError(
                f"publication {view.number} has no {plain!r}, which the program needs: name the "
                "target of the job that exported it"
            )
        new = torch.from_numpy(view.dense[plain]).to(device or value.device, value.dtype)
        if new.shape != value.shape:
            raise ConfigError(
                f"publication {view.number} has {plain!r} of shape {list(new.shape)}, expected "
                f"{list(value.shape)}: export the model that is published"
            )
        found[name] = new
    return found


def _set_values(module: nn.Module, view: RowView, prefix: str) -> None:
    state = module.state_dict(keep_vars=True)
    for name, new in new_values(state, view, prefix).items():
        parent, _, own = name.rpartition(".")
        is_parameter = isinstance(state[name], nn.Parameter)
        value = nn.Parameter(new, requires_grad=False) if is_parameter else new
        setattr(module.get_submodule(parent), own, value)


def _check_tables(lookups: Sequence[LookupEntry], view: RowView) -> None:
    for entry in lookups:
        dim = view.tables.get(entry.table)
        if dim != entry.dim:
            has = "no such table" if dim is None else f"rows of {dim} there"
            raise ConfigError(
                f"the program looks up rows of {entry.dim} in table {entry.table!r}, and "
                f"publication {view.number} has {has}; name the target that this model's job "
                "publishes to"
            )
