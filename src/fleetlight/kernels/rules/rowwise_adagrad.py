# SPDX-License-Identifier: Apache-2.0
"""Adagrad with one accumulator for each row: the sum of the mean squares of its gradients."""

from __future__ import annotations

import math

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Rule
from fleetlight.kernels.rules.adagrad import INITIAL, LAYER_OPTIONS, fixed, hyper_parameters


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    square = np.float32(0)
    for c in range(dim):
        grad = grads[g + c] + h[1] * slab[at + c]
        square += grad * grad
    total = slab[at + dim] + square / np.float32(dim)
    slab[at + dim] = total
    rate = h[0] / (np.float32(math.sqrt(total)) + h[2])
    for c in range(dim):
        weight = slab[at + c]
        slab[at + c] = weight - rate * (grads[g + c] + h[1] * weight)


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    grads = grads + h[1] * weights
    total = state + (grads * grads).mean(1, keepdims=True)
    return weights - h[0] * grads / (np.sqrt(total) + h[2]), total


RULE = Rule(
    "rowwise_adagrad",
    _step,
    _twin,
    hyper_parameters,
    row_state=("sum",),
    initial_option=INITIAL,
    counts_steps=True,
    layer_options=LAYER_OPTIONS,
    optimizers={"RowwiseAdagrad": fixed},
)
