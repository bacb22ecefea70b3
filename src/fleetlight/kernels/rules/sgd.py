# SPDX-License-Identifier: Apache-2.0
"""`torch.optim.SGD` without momentum."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Options, Rule, lr_and_decay


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        weight = slab[at + c]
        slab[at + c] = weight - h[0] * (grads[g + c] + h[1] * weight)


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    return weights - h[0] * (grads + h[1] * weights), state


def _hyper_parameters(options: Options, step: int) -> tuple[float, ...]:
    return lr_and_decay(options)


RULE = Rule(
    "sgd",
    _step,
    _twin,
    _hyper_parameters,
    layer_options={"weight_decay": 0.0},
    optimizers={"SGD": lambda group: None if group["momentum"] else {}},
    zero_options=("momentum",),
)
