# SPDX-License-Identifier: Apache-2.0
"""`IdLookahead`: announces the ids of a loader's next batch, so that their rows are prefetched.

The script gives a function for them, or they are learned from the tensors of a batch that reach a
table unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetlight.errors import PlanError, did_you_mean
from fleetlight.fleet.job import IdsOf, Job
from fleetlight.fleet.plan.bound_plan import mode_of
from fleetlight.fleet.served.session import ServerSession
from fleetlight.ps.layers.embedding import ids_of
from fleetlight.ps.plan import GEO
from fleetlight.ps.update import Ids
from fleetlight.torch_compat.tensors import tree_flatten_with_path

#: address and number of the elements of a tensor, the same for views of all elements
_Memory = tuple[int, int]


class IdLookahead:
    """The lookahead of one loader, which passes it two batches: the current and the next."""

    def __init__(self, job: Job, session: ServerSession, ids_of_batch: IdsOf | None) -> None:
        self._job, self._session = job, session
        self._ids_of_batch = ids_of_batch
        #: the current batch, referenced so that no other tensor gets the memory of its tensors
        self._now: Any = None
        self._paths: dict[_Memory, Any] = {}
        #: by table: the paths of its ids in a batch
        self._learned: dict[int, dict[Any, None]] = {}

    def wanted(self) -> bool:
        """True when the loader reads one batch ahead; workers of GeoSGD have their own rows."""
        return mode_of(self._job.strategy) != GEO

    def announce(self, batches: Sequence[Any]) -> None:
        """Prefetch the rows of the next batch; `batches` are the current and the next."""
        session = self._session
        self._now, coming = batches[0], batches[1:]
        if self._ids_of_batch is None:
            self._watch(self._now)
        if not session.is_open:
            return
        communicator = session.communicator
        if self._ids_of_batch is None:
            communicator.reached = self._reached
        communicator.announce(self._ids(coming[0]) if coming else {})

    def _watch(self, batch: Any) -> None:
        self._paths = {
            (tensor.data_ptr(), tensor.numel()): path for path, tensor in _id_tensors(batch)
        }

    def _reached(self, table: int, ids: Ids) -> None:
        """Learn the path of ids that a table reads, if they are a tensor of the batch."""
        path = self._paths.get((ids.ctypes.data, len(ids)))
        if path is not None:
            self._learned.setdefault(table, {})[path] = None

    def _ids(self, batch: Any) -> dict[int, Ids]:
        if self._ids_of_batch is not None:
            return self._numbered(self._ids_of_batch(batch))
        if not self._learned:
            return {}
        tensors = dict(_id_tensors(batch))
        found = {
            table: [_flat(tensors[path]) for path in paths if path in tensors]
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


def _id_tensors(batch: Any) -> list[tuple[Any, Tensor]]:
    """The tensors of a nested batch that can reach a table unchanged, with their paths."""
    return [
        (path, leaf)
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, Tensor)
        and leaf.dtype == torch.int64
        and leaf.device.type == "cpu"
        and leaf.numel()
        and leaf.is_contiguous()
    ]


def _flat(tensor: Tensor) -> Ids:
    return ids_of(tensor, "lookahead")


def _joined(parts: Sequence[Ids]) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
