# SPDX-License-Identifier: Apache-2.0
"""`torch.optim.Adagrad`."""

from __future__ import annotations

import math

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Options, Rule, lr_and_decay

INITIAL = "initial_accumulator_value"
LAYER_OPTIONS = {"eps": 1e-10, "lr_decay": 0.0, INITIAL: 0.0, "weight_decay": 0.0}


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        weight = slab[at + c]
        grad = grads[g + c] + h[1] * weight
        total = slab[at + dim + c] + grad * grad
        slab[at + dim + c] = total
        slab[at + c] = weight - h[0] * grad / (np.float32(math.sqrt(total)) + h[2])


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    grads = grads + h[1] * weights
    total = state + grads * grads
    return weights - h[0] * grads / (np.sqrt(total) + h[2]), total


def hyper_parameters(options: Options, step: int) -> tuple[float, ...]:
    """The decayed learning rate, the weight decay and epsilon."""
    lr, decay = lr_and_decay(options)
    rate = lr / (1 + (step - 1) * float(options.get("lr_decay", 0.0)))
    return rate, decay, float(options.get("eps", 1e-10))


def fixed(group: Options) -> dict[str, float]:
    """The first value of the accumulators: rows that begin later have it, too."""
    return {INITIAL: float(group[INITIAL])}


RULE = Rule(
    "adagrad",
    _step,
    _twin,
    hyper_parameters,
    weight_state=("sum",),
    initial_option=INITIAL,
    counts_steps=True,
    layer_options=LAYER_OPTIONS,
    optimizers={"Adagrad": fixed},
)
