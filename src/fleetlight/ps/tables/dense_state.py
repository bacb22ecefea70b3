# SPDX-License-Identifier: Apache-2.0
"""The state of dense parameters between optimizers, servers and checkpoints. Pure.

A server stores pieces of parameters. A checkpoint stores whole parameters, so that any number of
servers can load it. `whole` joins the pieces of all servers, `part` cuts the pieces of one server.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.errors import CheckpointError
from fleetlight.ps.dtypes import as_tensor, flat_array, numpy_dtype
from fleetlight.ps.placement import BlockSlice, Placement
from fleetlight.ps.plan import Plan

Array = NDArray[Any]
Scalar = bool | int | float | None
#: kinds of state: one number for each element, cut like the parameter | anything else
ELEMENTS, ODD = "elements", "odd"


@dataclasses.dataclass
class PieceState:
    """The optimizer state of a piece, or of a whole parameter; each tensor has a kind."""

    tensors: dict[str, tuple[str, Array]]
    scalars: dict[str, Scalar]

    @classmethod
    def of(cls, state: Mapping[str, Any], shape: tuple[int, ...], name: str) -> PieceState:
        """Copy an optimizer's state of a parameter with this shape."""
        found = cls({}, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                kind = ELEMENTS if tuple(value.shape) == shape else ODD
                array = flat_array(value).copy()
                found.tensors[key] = kind, array if kind == ELEMENTS else array.reshape(value.shape)
            elif value is None or isinstance(value, (bool, int, float)):
                found.scalars[key] = value
            else:
                raise CheckpointError(
                    f"the optimizer keeps a {type(value).__name__} in {key!r} of {name!r}, "
                    "expected a tensor or a number: servers cannot save other state"
                )
        return found

    def live(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """The state in the form of an optimizer, for a parameter with this shape."""
        found: dict[str, Any] = dict(self.scalars)
        for name, (kind, array) in self.tensors.items():
            if kind == ELEMENTS and array.size != math.prod(shape):
                raise CheckpointError(
                    f"dense state: {name!r} has {array.size} elements, expected the shape "
                    f"{shape}; it is for another server or plan"
                )
            tensor = tensor_of(array).clone()
            found[name] = tensor.view(shape) if kind == ELEMENTS else tensor
        return found


@dataclasses.dataclass
class DenseState:
    """The dense state of one server, in a message. Pieces are numbered across its blocks."""

    #: the values of each block
    values: list[Array]
    #: for each of `arrays`: piece, name, kind
    state: list[tuple[int, str, str]]
    #: one for each piece; empty if the workers step dense parameters
    scalars: list[dict[str, Scalar]]
    arrays: list[Array]

    @classmethod
    def of(cls, values: list[Array], pieces: Sequence[PieceState]) -> DenseState:
        """Build from the state of each piece."""
        entries = [
            (number, name, kind, array)
            for number, piece in enumerate(pieces)
            for name, (kind, array) in piece.tensors.items()
        ]
        state = [(number, name, kind) for number, name, kind, _ in entries]
        return cls(values, state, [p.scalars for p in pieces], [array for *_, array in entries])

    def pieces(self) -> list[PieceState]:
        """The state of each piece."""
        found = [PieceState({}, dict(scalars)) for scalars in self.scalars]
        if len(self.state) != len(self.arrays):
            raise CheckpointError(
                f"dense state has {len(self.arrays)} tensors, expected {len(self.state)}"
            )
        for (number, name, kind), array in zip(self.state, self.arrays, strict=True):
            if not 0 <= number < len(found):
                raise CheckpointError(
                    f"dense state: got {name!r} of piece {number}, but only {len(found)} pieces"
                )
            found[number].tensors[name] = kind, array
        return found


@dataclasses.dataclass
class WholeState:
    """Flat dense parameters and their optimizer state, by the number of the parameter."""

    values: dict[int, Array]
    state: dict[int, PieceState]


def whole(plan: Plan, placement: Placement, servers: Sequence[DenseState]) -> WholeState:
    """Join the dense state of all servers."""
    found = WholeState({}, {})
    for server, kept in enumerate(servers):
        states = kept.pieces()
        for number, (piece, values) in enumerate(_pieces(placement, server, kept.values)):
            size = math.prod(plan.dense[piece.parameter].shape)
            _put(found.values, piece.parameter, piece, size, values)
            if states:
                _join(found.state.setdefault(piece.parameter, PieceState({}, {})), piece, size,
                      states[number])  # fmt: skip
    return found


def part(plan: Plan, placement: Placement, server: int, all_: WholeState) -> DenseState:
    """The part of the whole state that one server stores."""
    values = []
    pieces = []
    for block in placement.blocks_of(server):
        flat = np.empty(block.size, numpy_dtype(block.dtype))
        for piece in block.pieces:
            flat[piece.offset : piece.offset + piece.size] = all_.values[piece.parameter][
                piece.start : piece.stop
            ]
            pieces.append(_cut(all_.state.get(piece.parameter), piece))
        values.append(flat)
    return DenseState.of(values, pieces if all_.state else [])


def tensor_of(array: Array) -> Tensor:
    """An array of state as a tensor over the same memory; uint16 becomes bfloat16."""
    # as_tensor uses the dtype only to recognise bfloat16
    return as_tensor(array, torch.bfloat16 if array.dtype == np.uint16 else torch.float32)


def _pieces(
    placement: Placement, server: int, values: Sequence[Array]
) -> Iterator[tuple[BlockSlice, Array]]:
    for block, flat in zip(placement.blocks_of(server), values, strict=True):
        for piece in block.pieces:
            yield piece, flat[piece.offset : piece.offset + piece.size]


def _put(into: dict[Any, Array], key: Any, piece: BlockSlice, size: int, values: Array) -> None:
    if key not in into:
        into[key] = np.empty(size, values.dtype)
    into[key][piece.start : piece.stop] = values


def _join(found: PieceState, piece: BlockSlice, size: int, state: PieceState) -> None:
    """Add the state of a piece; all pieces of a parameter have equal numbers."""
    flat = {name: array for name, (_, array) in found.tensors.items()}
    for name, (kind, array) in state.tensors.items():
        if kind == ELEMENTS:
            _put(flat, name, piece, size, array)
            found.tensors[name] = kind, flat[name]
        else:
            found.tensors[name] = kind, array
    found.scalars.update(state.scalars)


def _cut(state: PieceState | None, piece: BlockSlice) -> PieceState:
    if state is None:
        return PieceState({}, {})
    tensors = {
        name: (kind, array[piece.start : piece.stop] if kind == ELEMENTS else array)
        for name, (kind, array) in state.tensors.items()
    }
    return PieceState(tensors, dict(state.scalars))
