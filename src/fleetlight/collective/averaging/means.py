# SPDX-License-Identifier: Apache-2.0
"""Who takes means for workers that meet: `Means`, and the `Member` of a meeting that has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

#: before the name of a parameter: how far it has moved
MOVED = "moved/"


class Means(Protocol):
    """Takes means over the workers, by their one reducer."""

    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        """Put the means over all workers in the place of tensors, whose names are their own.

        All workers come here with the same names, shapes and types; those that have made other
        steps are an error. What is called `moved/<parameter>` may be coded as that parameter's
        gradients are.
        """


class Member(NamedTuple):
    """A model, and who takes the means of what it has."""

    means: Means
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
