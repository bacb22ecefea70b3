# SPDX-License-Identifier: Apache-2.0
"""`IdLookahead`: announces the ids of a loader's next batch, so that their rows are prefetched.

The script gives a function for them, or they are learned from the tensors of a batch that reach a
table unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetlight.errors import PlanError, did_you_mean
from fleetlight.fleet.job import IdsOf, Job
from fleetlight.fleet.plan.bound_plan import mode_of
from fleetlight.fleet.served.session import ServerSession
from fleetlight.ps.layers.embedding import ids_of
from fleetlight.ps.plan import ASYNC, GEO, SYNC
from fleetlight.ps.update import Ids
from fleetlight.torch_compat.tensors import tree_flatten_with_path

#: address and number of the elements of a tensor, the same for views of all elements
_Memory = tuple[int, int]


class IdLookahead:
    """The lookahead of one loader, which passes it the current batch and those after it."""

    def __init__(self, job: Job, session: ServerSession, ids_of_batch: IdsOf | None) -> None:
        self._job, self._session = job, session
        self._ids_of_batch = ids_of_batch
        #: the current batch and those after it: no other tensor gets the memory of their tensors
        self._batches: list[_LoadedBatch] = []
        self._paths: dict[_Memory, Any] = {}
        #: by table: the paths of its ids in a batch
        self._learned: dict[int, dict[Any, None]] = {}

    def batches_ahead(self) -> int:
        """How many batches the loader reads ahead."""
        return batches_ahead(self._job)

    def announce(self, batches: Sequence[Any]) -> None:
        """Announce the batches after the current one, which comes first."""
        known = {id(one.batch): one for one in self._batches}
        self._batches = [known.get(id(batch)) or _LoadedBatch(batch) for batch in batches]
        if self._ids_of_batch is None:
            self._paths = self._batches[0].paths
        if not self._session.is_open:
            return
        communicator = self._session.communicator
        if self._ids_of_batch is None:
            communicator.reached = self._reached
        coming = self._batches[1:]
        for one in coming:
            # the first batches are loaded before any table is known
            one.ids = one.ids or self._ids(one)
        communicator.announce([one.ids for one in coming])

    def _reached(self, table: int, ids: Ids) -> None:
        """Learn the path of ids that a table reads, if they are a tensor of the batch."""
        path = self._paths.get((ids.ctypes.data, len(ids)))
        if path is not None:
            self._learned.setdefault(table, {})[path] = None

    def _ids(self, one: _LoadedBatch) -> dict[int, Ids]:
        if self._ids_of_batch is not None:
            return self._numbered(self._ids_of_batch(one.batch))
        found = {
            table: [_flat(one.tensors[path]) for path in paths if path in one.tensors]
            for table, paths in self._learned.items()
        }
        return {table: _joined(parts) for table, parts in found.items() if parts}

    def _numbered(self, given: Mapping[str, Tensor]) -> dict[int, Ids]:
        """The ids that the script's function has returned, by number of the table."""
        session = self._session
        numbers = {table.name: n for n, table in enumerate(session.bound.plan.tables)}
        unknown = [name for name in given if name not in numbers]
        if unknown:
            raise PlanError(
                f"lookahead: the model has no table {unknown[0]!r}; "
                f"{did_you_mean(unknown[0], numbers)}"
            )
        return {numbers[name]: ids_of(ids, f"lookahead of {name}") for name, ids in given.items()}


def batches_ahead(job: Job) -> int:
    """How many batches are read ahead; workers of GeoSGD have their own rows.

    An async worker trains on one while the rows of the other are in flight.
    """
    return {SYNC: 1, ASYNC: 2, GEO: 0}[mode_of(job.strategy)]


class _LoadedBatch:
    """A batch, its tensors that can reach a table unchanged, and its announced ids."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.ids: dict[int, Ids] = {}
        #: by their path in the batch
        self.tensors: dict[Any, Tensor] = dict(_id_tensors(batch))
        self.paths: dict[_Memory, Any] = {
            (tensor.data_ptr(), tensor.numel()): path for path, tensor in self.tensors.items()
        }


def _id_tensors(batch: Any) -> Iterator[tuple[Any, Tensor]]:
    """The tensors of a nested batch that can reach a table unchanged, with their paths."""
    if isinstance(batch, Tensor):
        leaves: Iterable[tuple[Any, Any]] = [((), batch)]
    elif type(batch) in (list, tuple) and all(isinstance(leaf, Tensor) for leaf in batch):
        leaves = enumerate(batch)
    else:
        leaves = tree_flatten_with_path(batch)[0]
    for path, leaf in leaves:
        leaf = _values(leaf)
        if (
            isinstance(leaf, Tensor)
            and leaf.dtype == torch.int64
            and leaf.device.type == "cpu"
            and leaf.numel()
            and leaf.is_contiguous()
        ):
            yield path, leaf


def _values(leaf: Any) -> Any:
    """The values of a jagged tensor, which has no memory of its own; other leaves as they are."""
    is_jagged = isinstance(leaf, Tensor) and leaf.layout == torch.jagged
    return leaf.values() if is_jagged else leaf


def _flat(tensor: Tensor) -> Ids:
    return ids_of(tensor, "lookahead")


def _joined(parts: Sequence[Ids]) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
