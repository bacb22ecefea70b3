# SPDX-License-Identifier: Apache-2.0
"""What a route is: a way for tensors to be summed over the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.futures import Future

from fleetlight.collective.position import Stamp


class Part(NamedTuple):
    """A parameter's values in a bucket."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, flat in one buffer."""

    index: int
    buffer: Tensor
    #: whose they are, in order, where they may travel in another form
    parts: tuple[Part, ...] = ()
    #: True for values that travel as they are in any case: they are no gradients
    is_exact: bool = False


class Route(Protocol):
    """A way for tensors to be summed over the workers."""

    def start(self, bucket: Bucket, stamp: Stamp) -> Future[Any]:
        """Begin to sum a bucket, in place; give the others this worker's stamp."""

    def finish(self) -> None:
        """Bring everything started to its end, as far as that takes this worker's doing."""

    def stamps(self) -> Mapping[int, Stamp]:
        """The stamps of the workers; asked once, when all the sums are there."""

    def close(self) -> None:
        """Let go of what was opened for it."""
