# SPDX-License-Identifier: Apache-2.0
"""Addition, the rule of servers for the differences of GeoSGD."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Options, Rule


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        slab[at + c] += grads[g + c]


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    return weights + grads, state


def _hyper_parameters(options: Options, step: int) -> tuple[float, ...]:
    return ()


RULE = Rule("add", _step, _twin, _hyper_parameters)
