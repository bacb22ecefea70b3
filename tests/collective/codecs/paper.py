# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression as its paper defines it, in NumPy: the reference for DGC."""

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


@dataclasses.dataclass
class Paper:
    """One parameter on all senders, encoded in parts that end at `cuts`."""

    weight: Doubles
    senders: int
    cuts: tuple[int, ...] = ()
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    masking: bool = True

    def __post_init__(self) -> None:
        """Start with zero momentum and residual."""
        self.u = np.zeros((self.senders, self.weight.size))
        self.v = np.zeros((self.senders, self.weight.size))

    def begin(self, buffer: Doubles) -> None:
        """Continue from the momentum buffer of dense training, as torch stores it."""
        self.u[:] = buffer * (self.momentum if self.nesterov else 1) / self.senders

    def step(self, gradients: Doubles, sparsity: float) -> None:
        """`gradients` holds, for each sender, its part of the mean."""
        movement = np.zeros(self.weight.size)
        for sender, gradient in enumerate(gradients):
            for part in self._parts():
                sent = self._gather(sender, part, gradient[part], sparsity)
                movement[sent] += self.v[sender, sent]
                self.v[sender, sent] = 0
                if self.masking:
                    self.u[sender, sent] = 0
        self.weight = self.weight - self.lr * movement

    def _parts(self) -> list[slice]:
        return [slice(a, b) for a, b in itertools.pairwise([0, *self.cuts, self.weight.size])]

    def _gather(self, sender: int, part: slice, g: Doubles, sparsity: float) -> NDArray[np.int64]:
        """Returns the indices of the largest values."""
        u, v, m = self.u[sender], self.v[sender], self.momentum
        if self.clip_norm is not None:
            limit = self.clip_norm * math.sqrt(g.size / self.weight.size / self.senders)
            g = g * min(1.0, limit / np.linalg.norm(g))
        g = g + self.weight_decay * self.weight[part] / self.senders
        u[part] = m * (u[part] + g) if self.nesterov else m * u[part] + g
        v[part] += u[part] + g if self.nesterov else u[part]
        count = max(1, math.ceil(round((1 - sparsity) * g.size, 6)))
        return part.start + np.argsort(-np.abs(v[part]), kind="stable")[:count]
