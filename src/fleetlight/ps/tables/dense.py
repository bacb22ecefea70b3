# SPDX-License-Identifier: Apache-2.0
"""`DenseBlocks`: the dense parameters of one server, stepped by the user's own optimizer classes.

A block is one flat tensor, as in a message. Each piece of it is a Parameter of the optimizer and a
view of the block's memory. Its gradient is a view of the message that brought it.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetlight.errors import CheckpointError, PlanError
from fleetlight.optim.layerwise import user_class
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.placement import Block, BlockSlice, Placement
from fleetlight.ps.plan import Plan
from fleetlight.ps.tables.dense_state import DenseState, PieceState
from fleetlight.ps.tables.optimizers import class_path
from fleetlight.ps.wire_forms import Output, no_output
from fleetlight.torch_compat.compiler.lazy_dynamo import late_step

Array = NDArray[Any]
#: attributes that Fleetlight and schedulers bind to the user's object
_TIED = frozenset({"step", "zero_grad", "minimize"})


@dataclasses.dataclass
class _ServedBlock:
    """A block, its values, and the Parameters that view them, in the order of its pieces."""

    block: Block
    values: Tensor
    parameters: list[nn.Parameter]

    def give(self, gradients: Array, absent: Collection[int]) -> None:
        """Set each Parameter's gradient to its part of flat gradients, or to None."""
        flat = _tensor(gradients, self.values, self.block)
        for piece, parameter in zip(self.block.pieces, self.parameters, strict=True):
            part = flat[piece.offset : piece.offset + piece.size]
            parameter.grad = None if piece.parameter in absent else part.view(parameter.shape)

    def take_back(self) -> None:
        """Remove the gradients: their memory is the message's."""
        for parameter in self.parameters:
            parameter.grad = None


@dataclasses.dataclass
class _Stepper:
    """An optimizer over the pieces that this server stores."""

    optimizer: torch.optim.Optimizer
    held: list[_ServedBlock]
    #: numbers of the user's param groups that have a piece here
    groups: list[int]

    def __post_init__(self) -> None:
        self._step = late_step(self.optimizer)

    def step(
        self, options: Sequence[Mapping[str, Any]], absent: Collection[int], grads: Sequence[Array]
    ) -> None:
        for number, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for key, value in options[number].items():
                group[key] = _option(value, group.get(key))
        try:
            for held, gradients in zip(self.held, grads, strict=True):
                held.give(gradients, absent)
            self._step()
        finally:
            for held in self.held:
                held.take_back()


class DenseBlocks:
    """All methods are thread-safe."""

    def __init__(
        self, held: list[_ServedBlock], steppers: dict[int, _Stepper], names: Sequence[str]
    ) -> None:
        self.lock = threading.RLock()
        self._names = names
        self._held = held
        self._steppers = steppers
        #: by number of the block
        self._copies: dict[int, Array] = {}

    @classmethod
    def build(
        cls,
        plan: Plan,
        placement: Placement,
        server: int,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[Tensor],
    ) -> DenseBlocks:
        """Build from the optimizers and parameters of the server's script, in the plan's order."""
        held = [_hold(plan, block, parameters) for block in placement.blocks_of(server)]
        steppers: dict[int, _Stepper] = {}
        numbers = set() if plan.workers_step_dense else {h.block.optimizer for h in held}
        for number in sorted(numbers):
            mine = [h for h in held if h.block.optimizer == number]
            steppers[number] = _stepper(plan, mine, optimizers[number], parameters)
        return cls(held, steppers, [dense.name for dense in plan.dense])

    def values(self, output: Output = no_output) -> list[Array]:
        """A copy of the present values of all blocks, in memory of `output` or read-only."""
        with self.lock:
            return [self._copy(number, output) for number in range(len(self._held))]

    def _copy(self, number: int, output: Output) -> Array:
        values = flat_array(self._held[number].values)
        out = output(values.shape, values.dtype.name)
        if out is not None:
            out[:] = values
            return out
        copy = self._copies.get(number)
        if copy is None:
            # all callers share one copy until the next step
            copy = self._copies[number] = values.copy()
            copy.flags.writeable = False
        return copy

    def fill(self, arrays: Sequence[Array]) -> None:
        """Set the values of all blocks."""
        with self.lock, torch.no_grad():
            self._copies.clear()
            for held, array in zip(self._held, arrays, strict=True):
                held.values.copy_(_tensor(array, held.values, held.block))

    def add(self, arrays: Sequence[Array], optimizer: int | None = None) -> None:
        """Add a worker's differences to all blocks, or to those of one optimizer."""
        held_there = [h for h in self._held if optimizer in (None, h.block.optimizer)]
        with self.lock, torch.no_grad():
            self._copies.clear()
            for held, array in zip(held_there, arrays, strict=True):
                held.values.add_(_tensor(array, held.values, held.block))

    def step(
        self,
        optimizer: int,
        options: Sequence[Mapping[str, Any]],
        absent: Collection[int],
        grads: Sequence[Array],
    ) -> None:
        """Make one step from the flat gradients of the optimizer's blocks.

        `options` has the options of each param group, `absent` the numbers of parameters that
        backward did not reach. Torch counts the steps of each parameter.
        """
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            return
        with self.lock:
            self._copies.clear()
            stepper.step(options, absent, grads)

    def state(self) -> DenseState:
        """A copy of the values and of the optimizers' state."""
        with self.lock:
            pieces = [
                PieceState.of(state, tuple(parameter.shape), self._name(piece))
                for piece, parameter, state in self._states()
            ]
            return DenseState.of(self.values(), pieces)

    def restore(self, state: DenseState) -> None:
        """Restore the values and the optimizers' state from `state`."""
        arrived = state.pieces()
        with self.lock:
            mine = self._states()
            if mine and arrived and len(mine) != len(arrived):
                raise CheckpointError(
                    f"dense state has {len(arrived)} pieces, expected {len(mine)}: it is for "
                    "another server or plan; nothing was loaded"
                )
            pairs = list(zip(mine, arrived, strict=False))
            live = [one.live(tuple(parameter.shape)) for (_, parameter, _), one in pairs]
            self.fill(state.values)
            for ((_, _, kept), _), one_live in zip(pairs, live, strict=True):
                kept.clear()
                kept.update(one_live)

    def _states(self) -> list[tuple[BlockSlice, nn.Parameter, dict[str, Any]]]:
        """Each piece with its Parameter and the live optimizer state of that Parameter."""
        return [
            (piece, parameter, self._steppers[held.block.optimizer].optimizer.state[parameter])
            for held in self._held
            if held.block.optimizer in self._steppers
            for piece, parameter in zip(held.block.pieces, held.parameters, strict=True)
        ]

    def _name(self, piece: BlockSlice) -> str:
        return self._names[piece.parameter]


def _hold(plan: Plan, block: Block, parameters: Sequence[Tensor]) -> _ServedBlock:
    """A block with the values of the parameters in this process."""
    values = torch.empty(block.size, dtype=getattr(torch, block.dtype))
    pieces = []
    for piece in block.pieces:
        parameter = parameters[piece.parameter].detach()
        mine = values[piece.offset : piece.offset + piece.size]
        mine.copy_(parameter.reshape(-1)[piece.start : piece.stop])
        # optimizers that are not elementwise may depend on the shape
        whole = piece.size == parameter.numel()
        pieces.append(nn.Parameter(mine.view(parameter.shape) if whole else mine))
    return _ServedBlock(block, values, pieces)


def _stepper(
    plan: Plan,
    held: list[_ServedBlock],
    original: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
) -> _Stepper:
    """An optimizer like `original` over the pieces, with the state of their parameters."""
    kind = user_class(original)
    _refuse_sparse(kind, plan, held)
    members: dict[int, list[nn.Parameter]] = collections.defaultdict(list)
    state: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
    for h in held:
        for piece, mine in zip(h.block.pieces, h.parameters, strict=True):
            members[plan.dense[piece.parameter].group].append(mine)
            known = original.state.get(parameters[piece.parameter])
            if known:
                shape = parameters[piece.parameter].shape
                state[mine] = {key: _part(value, shape, piece) for key, value in known.items()}
    groups = sorted(members)
    # without its constructor, whose arguments are unknown
    optimizer = kind.__new__(kind)
    kept = {k: v for k, v in vars(original).items() if k not in _TIED and "_hooks" not in k}
    optimizer.__setstate__({
        **kept,
        "defaults": dict(original.defaults),
        "state": state,
        "param_groups": [_group(original.param_groups[g], members[g]) for g in groups],
    })  # fmt: skip
    return _Stepper(optimizer, held, groups)


def _group(group: Mapping[str, Any], members: list[nn.Parameter]) -> dict[str, Any]:
    """A param group with the options of `group` and other parameters."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    # the pieces are on the CPU, wherever the user's parameters are
    options.update({key: False for key in ("capturable",) if key in options})
    return {"params": members, **options}


def _option(arrived: Any, known: Any) -> Any:
    """An option of a push, in the type that the user gave it, since torch depends on the type."""
    if isinstance(known, Tensor):
        return torch.as_tensor(arrived, dtype=known.dtype).view(known.shape)
    if isinstance(known, tuple):
        return tuple(map(_option, arrived, known))
    return tuple(arrived) if isinstance(arrived, list) else arrived


def _part(value: Any, shape: torch.Size, piece: BlockSlice) -> Any:
    """The part of a parameter's state that belongs to a piece."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    if value.shape == shape and piece.size != value.numel():
        return value.reshape(-1)[piece.start : piece.stop].clone()
    return value.clone()


def _refuse_sparse(kind: type, plan: Plan, held: list[_ServedBlock]) -> None:
    if kind is torch.optim.SparseAdam:
        name = plan.dense[held[0].block.pieces[0].parameter].name
        raise PlanError(
            f"the dense parameter {name!r} is in the optimizer {class_path(kind)}, which takes "
            "sparse gradients only; give dense parameters an optimizer of their own"
        )


def _tensor(array: Array, like: Tensor, block: Block) -> Tensor:
    """A received array as a tensor over the same memory."""
    expected = np.dtype(np.uint16) if like.dtype == torch.bfloat16 else like.numpy().dtype
    if array.shape != (block.size,) or array.dtype != expected:
        raise PlanError(
            f"server {block.server}: dense values of optimizer {block.optimizer} are "
            f"{array.dtype}{list(array.shape)}, expected {block.dtype}[{block.size}]"
        )
    return as_tensor(array, like.dtype)
