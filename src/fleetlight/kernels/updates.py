# SPDX-License-Identifier: Apache-2.0
"""One kernel for each rule: prefetch the rows, then let the rule change each of them once.

A rule sees a row in the flat slab: weights from `at` on, behind them its state; and a gradient from
`g` on. `h` are the numbers of `Rule.hyper` as float32.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from fleetlight.kernels.arrays import Doubles, Floats, Ids, Values
from fleetlight.kernels.compiling import Kernel, kernel, part
from fleetlight.kernels.row_access import ahead, ask

Numbers: TypeAlias = tuple[np.float32, np.float32, np.float32, np.float32, np.float32]


@part
def _sgd(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        weight = slab[at + c]
        slab[at + c] = weight - h[0] * (grads[g + c] + h[1] * weight)


@part
def _momentum(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        weight = slab[at + c]
        grad = grads[g + c] + h[1] * weight
        speed = h[2] * slab[at + dim + c] + grad
        slab[at + dim + c] = speed
        # h[3] asks for Nesterov's form
        slab[at + c] = weight - h[0] * (grad + h[2] * speed if h[3] != 0 else speed)


@part
def _adagrad(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        weight = slab[at + c]
        grad = grads[g + c] + h[1] * weight
        total = slab[at + dim + c] + grad * grad
        slab[at + dim + c] = total
        slab[at + c] = weight - h[0] * grad / (np.float32(math.sqrt(total)) + h[2])


@part
def _rowwise_adagrad(
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


@part
def _adam(
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


@part
def _add(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    for c in range(dim):
        slab[at + c] += grads[g + c]


@kernel
def _update(
    slab: Floats, width: int, numbers: Ids, grads: Values, dim: int, hyper: Doubles
) -> None:
    """Change row numbers[i] by gradient i; no row comes twice."""
    h = (
        np.float32(hyper[0]),
        np.float32(hyper[1]),
        np.float32(hyper[2]),
        np.float32(hyper[3]),
        np.float32(hyper[4]),
    )
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            ask(slab, np.uint64(numbers[i + early]) * np.uint64(width), width)
        at = np.uint64(numbers[i]) * np.uint64(width)
        _rule(slab, at, np.uint64(dim), grads, np.uint64(i) * np.uint64(dim), h)


_rule = _add  # stands for the rule of each variant

#: by the name of the rule
UPDATES: dict[str, Kernel[[Floats, int, Ids, Values, int, Doubles], None]] = {
    rule.__name__.strip("_"): _update.variant(f"update_by{rule.__name__}", _rule=rule)
    for rule in (_sgd, _momentum, _adagrad, _rowwise_adagrad, _adam, _add)
}
