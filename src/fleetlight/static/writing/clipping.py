# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping in a program: after the all-reduce, before the optimizer's step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fleetlight.errors import ConfigError
from fleetlight.static.graph.variable import Variable
from fleetlight.static.writing.recorder import Recorder
from fleetlight.torch_compat.optimizers import (
    foreach_clamp_max,
    foreach_clamp_min,
    foreach_mul,
    foreach_norm,
)

#: the fetch name of the norm of all gradients
NORM = "gradient_norm"
#: the constant of torch.nn.utils.clip_grad_norm_, against division by zero
_SMALL = 1e-6


@dataclasses.dataclass(frozen=True)
class Clip:
    """A limit of the norm of all gradients together, or of each absolute value."""

    norm: float | None = None
    value: float | None = None
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        for name, number in (("clip_norm", self.norm), ("clip_value", self.value)):
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            if number is not None and not (is_number and 0 < number < math.inf):
                raise ConfigError(f"{name}: got {number!r}, expected a number above 0")
        if self.norm is not None and self.value is not None:
            raise ConfigError(
                f"got clip_norm={self.norm} and clip_value={self.value}, expected one of them"
            )

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None

    def write(self, recorder: Recorder, gradients: dict[str, Variable]) -> dict[str, Variable]:
        """Write the clipping; return the gradients for the optimizer."""
        if not self or not gradients:
            return gradients
        with recorder.part_of("update"), recorder.writing(), torch.no_grad():
            clipped = self._scaled(recorder, gradients) if self.norm else self._cut(gradients)
            return dict(clipped)

    def _scaled(
        self, recorder: Recorder, gradients: dict[str, Variable]
    ) -> Iterator[tuple[str, Variable]]:
        norms = [
            norm
            for _, group in _alike(gradients)
            for norm in foreach_norm(list(group.values()), self.norm_type)
        ]
        total = torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0]) for norm in norms]), self.norm_type
        )
        recorder.names.setdefault(NORM, recorder.node_of(total))
        factor = (self.norm / (total + _SMALL)).clamp(max=1.0)
        for first, group in _alike(gradients):
            scaled = foreach_mul(list(group.values()), factor.to(first))
            yield from zip(group, scaled, strict=True)

    def _cut(self, gradients: dict[str, Variable]) -> Iterator[tuple[str, Variable]]:
        assert self.value is not None
        for _, group in _alike(gradients):
            low = foreach_clamp_min(list(group.values()), -self.value)
            yield from zip(group, foreach_clamp_max(low, self.value), strict=True)


#: no clipping
UNCLIPPED = Clip()


def _alike(gradients: Mapping[str, Variable]) -> Iterator[tuple[Tensor, dict[str, Variable]]]:
    """Groups of gradients with one dtype and device, each with its first gradient."""
    groups: dict[object, dict[str, Variable]] = {}
    for name, gradient in gradients.items():
        groups.setdefault((gradient.dtype, gradient.device), {})[name] = gradient
    for group in groups.values():
        yield next(iter(group.values())), group
