# SPDX-License-Identifier: Apache-2.0
"""FTRL-Proximal (McMahan et al. 2013), which `fleet.optim.Ftrl` names.

`z` is that of the paper times the learning rate, so a scheduler keeps what was learned. It is read
only for weights of 0, since any other weight determines it. So first values remain, as do changes
from elsewhere, such as the differences of GeoSGD.
"""

from __future__ import annotations

import math

import numpy as np

from fleetlight.kernels.arrays import Floats, Values
from fleetlight.kernels.compiling.kernel import part
from fleetlight.kernels.rule import Array, Numbers, Options, Rule


@part
def _step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    edge = h[0] * h[2]
    for c in range(dim):
        weight, grad = slab[at + c], grads[g + c]
        square = grad * grad
        if square != 0:
            total = slab[at + dim + dim + c] + square
            scale = h[1] + np.float32(math.sqrt(total)) + h[0] * h[3]
            past = np.float32(math.copysign(edge, weight)) if weight != 0 else -slab[at + dim + c]
            score = weight * scale - h[0] * grad + past
            excess = score - np.float32(math.copysign(edge, score))
            slab[at + c] = np.float32(0) if abs(score) <= edge else excess / scale
            slab[at + dim + c] = -score
            slab[at + dim + dim + c] = total


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    z, total = np.split(state, 2, axis=1)
    total, edge = total + grads * grads, h[0] * h[2]
    scale = h[1] + np.sqrt(total) + h[0] * h[3]
    past = np.where(weights != 0, np.copysign(edge, weights), -z)
    score = weights * scale - h[0] * grads + past
    # where the gradient is 0, `scale` may be too
    with np.errstate(divide="ignore", invalid="ignore"):
        after = (score - np.copysign(edge, score)) / scale
    after = np.where(np.abs(score) <= edge, 0.0, after)
    weights, z = np.where(grads != 0, (after, -score), (weights, z))
    return weights, np.hstack([z, total])


def _hyper_parameters(options: Options, step: int) -> tuple[float, ...]:
    defaults = {"beta": 1.0, "l1": 0.0, "l2": 0.0}
    more = (float(options.get(name, default)) for name, default in defaults.items())
    return (float(options["lr"]), *more)


RULE = Rule(
    "ftrl",
    _step,
    _twin,
    _hyper_parameters,
    weight_state=("z", "n"),
    layer_options={"beta": 1.0, "l1": 0.0, "l2": 0.0},
    optimizers={"Ftrl": lambda group: {}},
)
