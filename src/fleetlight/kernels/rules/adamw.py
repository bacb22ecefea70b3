# SPDX-License-Identifier: Apache-2.0
"""`torch.optim.AdamW`: Adam whose weight decay is no part of the gradient."""

from __future__ import annotations

import math

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Options, Rule
from fleetlight.kernels.rules import adam


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        weight, mean, square = slab[at + c], slab[at + dim + c], slab[at + dim + dim + c]
        grad = grads[g + c]
        mean += (grad - mean) * h[2]
        square += (grad * grad - square) * h[3]
        slab[at + dim + c] = mean
        slab[at + dim + dim + c] = square
        kept = weight - h[1] * weight
        slab[at + c] = kept - h[0] * mean / (np.float32(math.sqrt(square)) + h[4])


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    mean, square = np.split(state, 2, axis=1)
    mean, square = mean + h[2] * (grads - mean), square + h[3] * (grads * grads - square)
    kept = weights - h[1] * weights
    return kept - h[0] * mean / (np.sqrt(square) + h[4]), np.hstack([mean, square])


def _hyper_parameters(options: Options, step: int) -> tuple[float, ...]:
    rate, decay, first, second, eps = adam.hyper_parameters(options, step)
    # unlike SparseAdam, AdamW adds eps to the corrected root
    eps *= (1 - (1 - second) ** step) ** 0.5
    return rate, float(options["lr"]) * decay, first, second, eps


RULE = Rule(
    "adamw",
    _step,
    _twin,
    _hyper_parameters,
    weight_state=("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    layer_options={**adam.LAYER_OPTIONS, "weight_decay": 0.01},
    optimizers={
        "AdamW": lambda group: {},
        "Adam": lambda group: {} if group.get("decoupled_weight_decay") else None,
    },
)
