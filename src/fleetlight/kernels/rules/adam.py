# SPDX-License-Identifier: Apache-2.0
"""`torch.optim.SparseAdam`, which also replaces `torch.optim.Adam`."""

from __future__ import annotations

import math

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Options, Rule, lr_and_decay

LAYER_OPTIONS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
#: Adam with this option is AdamW
_DECOUPLED = "decoupled_weight_decay"


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        weight, mean, square = slab[at + c], slab[at + dim + c], slab[at + dim + dim + c]
        grad = grads[g + c] + h[1] * weight
        mean += (grad - mean) * h[2]
        square += (grad * grad - square) * h[3]
        slab[at + dim + c] = mean
        slab[at + dim + dim + c] = square
        slab[at + c] = weight - h[0] * mean / (np.float32(math.sqrt(square)) + h[4])


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    grads = grads + h[1] * weights
    mean, square = np.split(state, 2, axis=1)
    mean, square = mean + h[2] * (grads - mean), square + h[3] * (grads * grads - square)
    return weights - h[0] * mean / (np.sqrt(square) + h[4]), np.hstack([mean, square])


def hyper_parameters(options: Options, step: int) -> tuple[float, ...]:
    """The corrected learning rate, the weight decay, 1 - each beta, and epsilon."""
    lr, decay = lr_and_decay(options)
    first, second = map(float, options.get("betas", (0.9, 0.999)))
    # a layer's own options name each beta
    first, second = options.get("beta1", first), options.get("beta2", second)
    # SparseAdam does not correct eps, so the rate has both bias corrections
    rate = lr * (1 - second**step) ** 0.5 / (1 - first**step)
    # 1 - 0.999 in float32 is wrong from the fifth digit on
    return rate, decay, 1 - first, 1 - second, float(options.get("eps", 1e-8))


RULE = Rule(
    "adam",
    _step,
    _twin,
    hyper_parameters,
    weight_state=("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    layer_options=LAYER_OPTIONS,
    optimizers={
        "Adam": lambda group: None if group.get(_DECOUPLED) else {},
        "SparseAdam": lambda group: {},
    },
    zero_options=(_DECOUPLED,),
)
