# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression (Lin et al., 2018): sparsification with momentum correction.

With a sender's part g of the mean gradient and the momentum m of the optimizer,

    u = m u + g         with Nesterov's momentum  u = m (u + g)
    v = v + u                                     v = v + u + g

the largest of |v| are sent, and are 0 in v and in u afterwards. A sum of messages is no gradient
but a movement that contains momentum; `to_gradient` makes of it the gradient that the optimizer
turns back into that movement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.collective.buckets import as_it_lies
from fleetlight.collective.codecs.codec import CodecSegment, Span
from fleetlight.collective.codecs.forms.topk import fields_of, find_largest, sent_of
from fleetlight.errors import StrategyError
from fleetlight.kernels import add_at, all_finite, take_out


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """The sparsity of each step: dense for `begin` steps, then each level for a part of `steps`."""

    begin: int
    steps: int
    levels: Sequence[float]

    def __post_init__(self) -> None:
        """Refuse levels that do not rise."""
        levels = list(self.levels)
        if not levels or levels != sorted(levels) or not 0 <= levels[0] <= levels[-1] < 1:
            raise StrategyError(
                f"strategy.dgc_configs.sparsity: got {levels}, expected at least one number from 0 "
                "to below 1, none smaller than the one before it, such as [0.75, 0.9375, 0.999]"
            )

    def at(self, step: int) -> float | None:
        """The part of the values that a step, counted from 0, does not send; None: dense."""
        done = step - self.begin
        if done < 0:
            return None
        return self.levels[min(done * len(self.levels) // self.steps, len(self.levels) - 1)]


class Momentum(NamedTuple):
    """What the optimizer does with the gradient of a parameter."""

    parameter: Tensor
    factor: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    #: the optimizer's own, None before its first step
    buffer: Tensor | None = None


class DGC:
    """A message is indices, then values, as in `TopK`."""

    name = "dgc"
    divisible = False
    has_velocity = True

    def __init__(
        self,
        momentum_of: Callable[[str], Momentum],
        *,
        clip_norm: float | None = None,
        factor_masking: bool = True,
    ) -> None:
        self._momentum_of = momentum_of
        self._clip_norm = clip_norm
        self._factor_masking = factor_masking
        #: the number of senders
        self.senders = 1
        #: the part of the values that is not sent in this step
        self.sparsity = 0.0
        #: True in the first step, which takes momentum over from the optimizer
        self.is_first = False

    def message_bytes(self, spans: Sequence[Span]) -> int:
        """As in `Codec`."""
        return bytes_at(self.sparsity, spans)

    def encode(self, values: Tensor, segment: CodecSegment, message: Tensor) -> None:
        """As in `Codec`. Values that are not finite are sent, and nothing accumulates."""
        velocity, residual = segment.velocity, segment.residual
        assert velocity is not None
        assert residual is not None
        if not all_finite(values.numpy()):
            self._send(values, segment.spans, message)
            return
        for span in segment.spans:
            run = slice(span.start, span.stop)
            self._accumulate(span, values[run], velocity[run], residual[run])
        indices = self._send(residual, segment.spans, message)
        if self._factor_masking:
            velocity[torch.from_numpy(indices)] = 0.0

    def add(self, message: Tensor, spans: Sequence[Span], total: Tensor) -> None:
        """As in `Codec`."""
        add_at(*fields_of(message), total.numpy())

    def _send(self, values: Tensor, spans: Sequence[Span], message: Tensor) -> NDArray[np.int32]:
        """Move the largest values into the message; returns their indices."""
        indices, taken = fields_of(message)
        find_largest(values.numpy(), spans, 1 - self.sparsity, indices)
        take_out(values.numpy(), indices, taken)
        return indices

    def _accumulate(self, span: Span, gradient: Tensor, velocity: Tensor, residual: Tensor) -> None:
        momentum = self._momentum_of(span.name)
        run = slice(span.at, span.at + len(gradient))
        if self.is_first and momentum.buffer is not None:
            share = momentum.factor if momentum.nesterov else 1.0
            before = _flat(momentum.buffer, momentum.parameter)[run]
            velocity.copy_(before).mul_(share / self.senders)
        if self._clip_norm is not None:
            self._clip(gradient, momentum.parameter.numel())
        if momentum.weight_decay:
            decay = momentum.weight_decay / self.senders
            kept = _flat(momentum.parameter, momentum.parameter)[run]
            # gradients of a GPU come through main memory
            gradient.add_(kept.to(gradient.device), alpha=decay)
        if momentum.nesterov:
            velocity.add_(gradient).mul_(momentum.factor)
            residual.add_(velocity).add_(gradient)
        else:
            velocity.mul_(momentum.factor).add_(gradient)
            residual.add_(velocity)

    def _clip(self, gradient: Tensor, size: int) -> None:
        """Clip to a norm whose sum over independent senders has the limit.

        A slice of a parameter has its share of the limit.
        """
        assert self._clip_norm is not None
        limit = self._clip_norm * math.sqrt(len(gradient) / size / self.senders)
        norm = float(torch.linalg.vector_norm(gradient))
        if norm > limit:
            gradient.mul_(limit / norm)


def bytes_at(sparsity: float, spans: Sequence[Span]) -> int:
    """The length of a message at a sparsity."""
    return 8 * sum(sent_of(span, 1 - sparsity) for span in spans)


def to_gradient(movement: Tensor, momentum: Momentum) -> None:
    """Turn a movement, in place, into the gradient x by which the optimizer makes it.

    With the buffer b, the optimizer steps by b' = m b + x + w p, or by x + w p + m b' with
    Nesterov's momentum.
    """
    m = momentum.factor
    if momentum.buffer is not None:
        before = _shaped_like(movement, momentum.buffer, momentum.parameter)
        movement.add_(before, alpha=-(m * m) if momentum.nesterov else -m)
    if momentum.nesterov:
        movement.div_(1 + m)
    if momentum.weight_decay:
        kept = _shaped_like(movement, momentum.parameter, momentum.parameter)
        movement.add_(kept, alpha=-momentum.weight_decay)


def _shaped_like(movement: Tensor, tensor: Tensor, parameter: Tensor) -> Tensor:
    return tensor.detach() if movement.shape == tensor.shape else _flat(tensor, parameter)


def _flat(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Flatten in the order of the parameter's memory, as buckets do.

    The tensor may have another layout; momentum has one after it was loaded.
    """
    return as_it_lies(tensor.detach(), parameter).reshape(-1)
