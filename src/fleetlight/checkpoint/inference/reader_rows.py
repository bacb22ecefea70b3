# SPDX-License-Identifier: Apache-2.0
"""Rows of an exported program that come from a reader of publications, not from the program.

The program has an operation `fleetlight::published_rows` for each lookup. A call of the program
sets the view that its operations read, so that all of them read the same publication.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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


_view: contextvars.ContextVar[RowView] = contextvars.ContextVar("fleetlight_view")


@torch.library.custom_op("fleetlight::published_rows", mutates_args=())
def published_rows(ids: Tensor, table: str, dim: int) -> Tensor:
    """The published row of each id of one dimension."""
    view = _view.get(None)
    if view is None:
        raise ConfigError(
            f"the rows of table {table!r} come from a reader: load the model with "
            "fleet.load_inference_model(dirname, reader=fleetlight.serve.Reader(url))"
        )
    rows = torch.from_numpy(view.lookup(table, ids.cpu().numpy()))
    return rows.to(ids.device)


@published_rows.register_fake
def _(ids: Tensor, table: str, dim: int) -> Tensor:
    return ids.new_empty((ids.shape[0], dim), dtype=torch.float32)


class ReaderRows(nn.Module):
    """The rows of one table in an exported program."""

    def __init__(self, table: str, dim: int) -> None:
        super().__init__()
        self._table, self._dim = table, dim

    def forward(self, ids: Tensor) -> Tensor:
        """A row for each id of a 1-D tensor."""
        rows: Tensor = published_rows(ids, self._table, self._dim)
        return rows


class FollowingModule:
    """A module with the dense values of the newest publication, and the view of its rows."""

    def __init__(self, make: Callable[[], nn.Module], reader: RowReader) -> None:
        """`make` returns a new module each time; their values may share memory."""
        self._make, self._reader = make, reader
        self._now = self._of(reader.view)
        self._renewing = threading.Lock()

    @contextlib.contextmanager
    def newest(self) -> Iterator[nn.Module]:
        """The module; inside the block, its operations read rows of the same publication."""
        view, module = self._now
        if self._reader.view.number != view.number and self._renewing.acquire(blocking=False):
            # other threads continue with the publication before it
            try:
                view, module = self._now = self._of(self._reader.view)
            finally:
                self._renewing.release()
        token = _view.set(view)
        try:
            yield module
        finally:
            _view.reset(token)

    def _of(self, view: RowView) -> tuple[RowView, nn.Module]:
        """A module with the dense values of a view."""
        module = self._make()
        for name, value in module.state_dict(keep_vars=True).items():
            if name not in view.dense:
                continue
            new = torch.from_numpy(view.dense[name]).to(value.device, value.dtype)
            if new.shape != value.shape:
                raise ConfigError(
                    f"publication {view.number} has {name!r} of shape {list(new.shape)}, expected "
                    f"{list(value.shape)}: export the model that is published"
                )
            parent, _, own = name.rpartition(".")
            is_parameter = isinstance(value, nn.Parameter)
            new = nn.Parameter(new, requires_grad=False) if is_parameter else new
            setattr(module.get_submodule(parent), own, new)
        return view, module
