# SPDX-License-Identifier: Apache-2.0
"""`IdHints`: tells a job with parameter servers which ids the coming batch of a loader has.

The script says so by a function; or it is learned by looking which tensors of a batch come to a
table just as they are.
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

#: where the elements of a tensor are in memory: only views of all of them are in the same place
_Place = tuple[int, int]


class IdHints:
    """One for each loader. It is told two batches at a time: that in hand, and the next."""

    def __init__(self, job: Job, session: ServerSession, ids_of_batch: IdsOf | None) -> None:
        self._job, self._session = job, session
        self._ids_of_batch = ids_of_batch
        #: the batch in hand, kept so that nothing else comes to be in the place of its tensors
        self._now: Any = None
        self._paths: dict[_Place, Any] = {}
        #: where in a batch the ids of each table are found
        self._learned: dict[int, dict[Any, None]] = {}

    def wanted(self) -> bool:
        """True when a batch is to be loaded ahead: in GeoSGD workers have rows of their own."""
        return mode_of(self._job.strategy) != GEO

    def announce(self, batches: Sequence[Any]) -> None:
        """The batch handed out now, and the one after it, if there is one."""
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
            _place(tensor.data_ptr(), tensor.numel()): path for path, tensor in _id_tensors(batch)
        }

    def _reached(self, table: int, ids: Ids) -> None:
        """A table has been asked for these ids: are they one of the batch's tensors?"""
        path = self._paths.get(_place(ids.ctypes.data, len(ids)))
        if path is not None:
            self._learned.setdefault(table, {})[path] = None

    def _ids(self, batch: Any) -> dict[int, Ids]:
        if self._ids_of_batch is not None:
            return self._told(self._ids_of_batch(batch))
        if not self._learned:
            return {}
        tensors = dict(_id_tensors(batch))
        found = {
            table: [_flat(tensors[path]) for path in paths if path in tensors]
            for table, paths in self._learned.items()
        }
        return {table: _joined(parts) for table, parts in found.items() if parts}

    def _told(self, told: Mapping[str, Tensor]) -> dict[int, Ids]:
        session = self._session
        numbers = {table.name: n for n, table in enumerate(session.drawn.plan.tables)}
        unknown = [name for name in told if name not in numbers]
        if unknown:
            raise PlanError(
                f"lookahead: the model has no table {unknown[0]!r}; "
                f"{did_you_mean(unknown[0], numbers)}"
            )
        return {numbers[name]: ids_of(ids, f"lookahead of {name}") for name, ids in told.items()}


def _id_tensors(batch: Any) -> list[tuple[Any, Tensor]]:
    """The tensors of a batch, however nested, that can come to a table as they are."""
    return [
        (path, leaf)
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, Tensor)
        and leaf.dtype == torch.int64
        and leaf.device.type == "cpu"
        and leaf.numel()
        and leaf.is_contiguous()
    ]


def _place(address: int, count: int) -> _Place:
    return address, count


def _flat(tensor: Tensor) -> Ids:
    return ids_of(tensor, "lookahead")


def _joined(parts: Sequence[Ids]) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
