# SPDX-License-Identifier: Apache-2.0
"""Models in main memory that take the path of a GPU, whose copies arrive late."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fleetlight.fleet.served import session
from fleetlight.ps.layers import device_rows, lookup
from fleetlight.ps.layers.caching import device_cache
from fleetlight.ps.layers.collection import embedding_collection
from fleetlight.ps.layers.staging import Arrival, BlockingStaging
from fleetlight.ps.worker import local_parameters
from fleetlight.static.ops import rows
from fleetlight.static.running import pulling


class LateStaging(BlockingStaging):
    """Gradients are NaN in main memory until a reader waits for them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        #: the number of copies, and of those that a reader waited for
        self.started = self.arrived = 0

    def to_host(self, tensor: Tensor) -> Arrival:
        copied, there = torch.full_like(tensor.detach(), torch.nan), tensor.detach().clone()
        self.started += 1

        def arrived() -> Tensor:
            self.arrived += 1
            return copied.copy_(there)

        return arrived


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> LateStaging:
    """Let all models train as on a GPU."""
    late = LateStaging()

    def chosen(_: Any) -> LateStaging:
        return late

    for module in (lookup, embedding_collection, session, local_parameters, pulling, rows):
        patch.setattr(module, "is_on_device", lambda tensor: True)
    for module in (
        device_rows,
        device_cache,
        embedding_collection,
        session,
        local_parameters,
        pulling,
    ):
        patch.setattr(module, "staging_of", chosen)
    return late
