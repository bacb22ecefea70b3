# SPDX-License-Identifier: Apache-2.0
"""`torch.optim.SGD` with momentum, Nesterov's or plain."""

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
        grad = grads[g + c] + h[1] * weight
        velocity = h[2] * slab[at + dim + c] + grad
        slab[at + dim + c] = velocity
        slab[at + c] = weight - h[0] * (grad + h[2] * velocity if h[3] != 0 else velocity)


def _twin(weights: Array, state: Array, grads: Array, h: Array) -> tuple[Array, Array]:
    grads = grads + h[1] * weights
    velocity = h[2] * state + grads
    return weights - h[0] * (grads + h[2] * velocity if h[3] else velocity), velocity


def _hyper_parameters(options: Options, step: int) -> tuple[float, ...]:
    momentum, nesterov = float(options.get("momentum", 0.0)), bool(options.get("nesterov", False))
    return (*lr_and_decay(options), momentum, float(nesterov))


def _fixed(group: Options) -> dict[str, float] | None:
    return {"nesterov": float(group["nesterov"])} if group["momentum"] else None


RULE = Rule(
    "momentum",
    _step,
    _twin,
    _hyper_parameters,
    weight_state=("momentum_buffer",),
    layer_options={"momentum": 0.9, "nesterov": 0.0, "weight_decay": 0.0},
    optimizers={"SGD": _fixed},
)
