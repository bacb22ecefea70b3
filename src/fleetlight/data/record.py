# SPDX-License-Identifier: Apache-2.0
"""`Record`: what a recommender is trained on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Record(NamedTuple):
    """One click or person; in a batch each tensor has one dimension more, in front."""

    #: float32 [numbers], of the order of 1
    dense: Tensor
    #: int64 [categories], any of the 2^64 values
    ids: Tensor
    #: float32, 0 or 1
    label: Tensor
