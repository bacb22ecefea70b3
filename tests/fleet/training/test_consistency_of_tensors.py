# SPDX-License-Identifier: Apache-2.0
"""Reductions name a worker that gives a tensor of another shape."""

from typing import Any

import pytest
import torch

from fleetlight.errors import ConfigError
from fleetlight.fleet.training.consistency import check_same_shape


class TwoWorkers:
    """Two workers, of which the other one gives `theirs`."""

    def __init__(self, theirs: bytes) -> None:
        self._theirs = theirs

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        return [data, self._theirs]


def test_worker_with_another_shape_is_named() -> None:
    others: Any = TwoWorkers(b"torch.float32 [3]")
    with pytest.raises(ConfigError) as caught:
        check_same_shape(others, torch.ones(2), "metrics.sum")
    text = "metrics.sum: worker 0 passed torch.float32 [2], worker 1 passed torch.float32 [3]"
    assert text in str(caught.value)


def test_equal_shapes_are_accepted() -> None:
    others: Any = TwoWorkers(b"torch.float32 [2]")
    check_same_shape(others, torch.ones(2), "metrics.sum")
