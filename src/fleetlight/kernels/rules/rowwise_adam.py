# SPDX-License-Identifier: Apache-2.0
"""Adam with one second moment for each row, of the mean squares of its gradients."""

from __future__ import annotations

import math

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Rule
from fleetlight.kernels.rules.adam import LAYER_OPTIONS, hyper_parameters


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    squares = np.float32(0)
    for c in range(dim):
        grad = grads[g + c] + h[1] * slab[at + c]
        squares += grad * grad
    last = at + dim + dim
    square = slab[last] + (squares / np.float32(dim) - slab[last]) * h[3]
    slab[last] = square
    rate = h[0] / (np.float32(math.sqrt(square)) + h[4])
    for c in range(dim):
        weight, mean = slab[at + c], slab[at + dim + c]
        mean += (grads[g + c] + h[1] * weight - mean) * h[2]
        slab[at + dim + c] = mean
        slab[at + c] = weight - rate * mean


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    grads = grads + h[1] * weights
    mean, square = state[:, :-1], state[:, -1:]
    mean = mean + h[2] * (grads - mean)
    square = square + h[3] * ((grads * grads).mean(1, keepdims=True) - square)
    return weights - h[0] * mean / (np.sqrt(square) + h[4]), np.hstack([mean, square])


RULE = Rule(
    "rowwise_adam",
    _step,
    _twin,
    hyper_parameters,
    weight_state=("exp_avg",),
    row_state=("exp_avg_sq",),
    counts_steps=True,
    layer_options=LAYER_OPTIONS,
    optimizers={"RowwiseAdam": lambda group: {}},
)
