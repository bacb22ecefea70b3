# SPDX-License-Identifier: Apache-2.0
"""LSTM and GRU, operation by operation: torch's own loop needs a fixed batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetlight.errors import PlanError

#: the state of a cell; its first tensor is the output
State = tuple[Tensor, ...]
#: a cell: takes the projections of input and state, and the state
Cell = Callable[[Tensor, Tensor, State], State]


def lstm(
    x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, ...]:
    """torch.lstm for padded batches."""
    states = list(zip(*(tensor.unbind(0) for tensor in first), strict=True))
    out, last = _run(_lstm_cell, x, states, weights, *rest)
    return out, torch.stack([state[0] for state in last]), torch.stack([state[1] for state in last])


def gru(x: Tensor, first: Tensor, weights: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    """torch.gru for padded batches."""
    out, last = _run(_gru_cell, x, [(t,) for t in first.unbind(0)], weights, *rest)
    return out, torch.stack([state[0] for state in last])


WRITTEN_OUT: dict[Any, Callable[..., tuple[Tensor, ...]]] = {torch.lstm: lstm, torch.gru: gru}


def written_out(func: Any, args: Sequence[Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The function to call instead."""
    if isinstance(args[1], Tensor) and not args[1].is_floating_point():
        raise PlanError(
            "a program has no packed sequences, whose lengths are values of a batch; give the "
            "recurrent net a padded batch"
        )
    return WRITTEN_OUT[func]


def _run(
    cell: Cell,
    x: Tensor,
    first: Sequence[State],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    drop: float,
    trains: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, list[State]]:
    """Run all layers, one after another, each over all times."""
    ways = 2 if both_ways else 1
    count = len(weights) // (layers * ways)
    parts = [weights[i : i + count] for i in range(0, len(weights), count)]
    last = []
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(layers):
        outs = []
        for way in range(ways):
            number = layer * ways + way
            out, state = _over_time(cell, x, first[number], parts[number], has_biases, way == 1)
            outs.append(out)
            last.append(state)
        x = torch.cat(outs, -1) if both_ways else outs[0]
        if drop and trains and layer < layers - 1:
            x = torch.dropout(x, drop, True)
    return (x.transpose(0, 1) if batch_first else x), last


def _over_time(
    cell: Cell,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    is_backwards: bool,
) -> tuple[Tensor, State]:
    """Run one layer in one direction."""
    bias, own_bias = weights[2:4] if has_biases else (None, None)
    projection = weights[-1] if len(weights) % 2 else None
    steps = F.linear(x, weights[0], bias).unbind(0)
    outs: list[Tensor] = []
    for gates in reversed(steps) if is_backwards else steps:
        state = cell(gates, F.linear(state[0], weights[1], own_bias), state)
        if projection is not None:
            state = (F.linear(state[0], projection), *state[1:])
        outs.append(state[0])
    return torch.stack(outs[::-1] if is_backwards else outs), state


def _lstm_cell(gates: Tensor, own: Tensor, state: State) -> State:
    i, f, g, o = (gates + own).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(gates: Tensor, own: Tensor, state: State) -> State:
    r, z, n = gates.chunk(3, -1)
    own_r, own_z, own_n = own.chunk(3, -1)
    z = (z + own_z).sigmoid()
    n = (n + (r + own_r).sigmoid() * own_n).tanh()
    return ((state[0] - n) * z + n,)
