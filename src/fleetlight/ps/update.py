# SPDX-License-Identifier: Apache-2.0
"""`Update`: the gradients of one optimizer step, before they are split among the servers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclasses.dataclass
class TableGradients:
    """Gradients of distinct ids of one table; the ids are grouped by server."""

    ids: Ids
    #: start of the ids of server i; one more entry than servers
    starts: NDArray[np.int64]
    gradients: Floats
    #: shows and clicks of each id, for tables that count them
    shows: Floats | None = None
    clicks: Floats | None = None

    def only(self, kept: NDArray[np.bool_]) -> TableGradients:
        """Keep only some of the ids."""
        before = np.concatenate(([0], np.cumsum(kept)))
        return TableGradients(
            ids=self.ids[kept],
            starts=before[self.starts],
            gradients=self.gradients[kept],
            shows=None if self.shows is None else self.shows[kept],
            clicks=None if self.clicks is None else self.clicks[kept],
        )


@dataclasses.dataclass
class Update:
    """One step of one optimizer on this worker."""

    optimizer: int
    #: the worker's step, from 0
    step: int
    #: hyper-parameters of each param group when the gradients were computed
    options: list[dict[str, Any]]
    #: by number of the table in the plan
    tables: dict[int, TableGradients]
    #: by number of the parameter in the plan; None for parameters without a gradient
    dense: dict[int, NDArray[Any] | None]
    #: True when the loss scaler found an infinity: all workers skip this step
    skip: bool = False
    #: `version` of each server's values that the gradients were computed with
    seen: tuple[int, ...] = ()
    #: the position in the script, which only the worker's journal reads
    resume_point: object = None

    @property
    def is_empty(self) -> bool:
        """True when backward left no gradient at all."""
        return not self.tables and all(values is None for values in self.dense.values())
