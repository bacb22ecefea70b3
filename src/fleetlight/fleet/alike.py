# SPDX-License-Identifier: Apache-2.0
"""What workers reduce together must be alike; else it is said who differs, and how."""

from __future__ import annotations

from torch import Tensor

from fleetlight.errors import ConfigError
from fleetlight.fleet.job import Peers


def check_alike(group: Peers, tensor: Tensor, operation: str) -> None:
    """Every worker must give the same type and shape."""
    kinds = group.gather_bytes(f"{tensor.dtype} {list(tensor.shape)}".encode(), operation)
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ConfigError(
                f"{operation}: worker 0 gives {kinds[0].decode()}, worker {index} gives "
                f"{kind.decode()}; all must give the same dtype and shape"
            )
