# SPDX-License-Identifier: Apache-2.0
"""Who gives something of another shape to a reduction is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleetlight.errors import ConfigError
from fleetlight.fleet.training.consistency import check_same_shape


class Both:
    """Two workers, of whom the other one gives `theirs`."""

    def __init__(self, theirs: bytes) -> None:
        self._theirs = theirs

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        return [data, self._theirs]


def test_who_gives_another_shape_is_named() -> None:
    others: Any = Both(b"torch.float32 [3]")
    with pytest.raises(ConfigError) as told:
        check_same_shape(others, torch.ones(2), "metrics.sum")
    text = "metrics.sum: worker 0 gives torch.float32 [2], worker 1 gives torch.float32 [3]"
    assert text in str(told.value)


def test_what_is_alike_is_fine() -> None:
    others: Any = Both(b"torch.float32 [2]")
    check_same_shape(others, torch.ones(2), "metrics.sum")
