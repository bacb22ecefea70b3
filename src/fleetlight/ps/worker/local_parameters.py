# SPDX-License-Identifier: Apache-2.0
"""`LocalParameters`: the dense parameters of the worker's model, as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.ps.dtypes import as_tensor, flat_array, numpy_dtype
from fleetlight.ps.layers.staging import is_on_device, staging_of
from fleetlight.ps.placement import Block
from fleetlight.ps.wire_forms import Output, no_output
from fleetlight.torch_compat.tensors import version


class LocalParameters:
    """Reads and writes slices of the user's parameters, on the training thread only."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._views = [_view(parameter) for parameter in self._parameters]
        self._places = [parameter.data_ptr() for parameter in self._parameters]
        self._versions: list[int] = []
        self.note()

    def pack(
        self,
        block: Block,
        values: dict[int, NDArray[Any] | None] | None = None,
        output: Output = no_output,
    ) -> NDArray[Any]:
        """Copy the slices of a block into one array, from the parameters or `values` by number.

        The slice of a value that is None is zero.
        """
        dtype = numpy_dtype(block.dtype)
        packed = output((block.size,), dtype.name)
        if packed is None:
            packed = np.empty(block.size, dtype)
        for piece in block.pieces:
            target = packed[piece.offset : piece.offset + piece.size]
            flat = self.flat(piece.parameter) if values is None else values.get(piece.parameter)
            if flat is None:
                target[:] = 0
            else:
                target[:] = flat[piece.start : piece.stop]
        return packed

    def unpack(self, block: Block, values: NDArray[Any]) -> None:
        """Copy a block into the parameters."""
        for piece in block.pieces:
            arrived = values[piece.offset : piece.offset + piece.size]
            view = self._view(piece.parameter)
            if view is not None:
                view[piece.start : piece.stop] = arrived
            else:
                self._put(piece.parameter, piece.start, piece.stop, arrived)

    def views(self, block: Block) -> list[tuple[slice, NDArray[Any]]] | None:
        """Where each slice of a block is in it, with a view of its values; None without views."""
        views = []
        for piece in block.pieces:
            view = self._view(piece.parameter)
            if view is None:
                return None
            place = slice(piece.offset, piece.offset + piece.size)
            views.append((place, view[piece.start : piece.stop]))
        return views

    def note(self) -> None:
        """Record that the parameters equal the servers' values."""
        self._versions = [version(parameter) for parameter in self._parameters]

    def written(self) -> list[int]:
        """The numbers of parameters written to since `note`, by torch's version counters."""
        known = zip(self._parameters, self._versions, strict=True)
        return [n for n, (parameter, before) in enumerate(known) if version(parameter) != before]

    def flat(self, number: int) -> NDArray[Any]:
        """All values of a parameter, as a view where possible."""
        view = self._view(number)
        return flat_array(self._parameters[number]) if view is None else view

    def _view(self, number: int) -> NDArray[Any] | None:
        """A view of the values; created again when the user has moved the parameter."""
        parameter = self._parameters[number]
        if parameter.data_ptr() != self._places[number]:
            if parameter.dtype != self._dtypes[number]:
                raise PlanError(
                    f"parameter {number} of the model is {parameter.dtype} now, but the servers "
                    f"keep it as {self._dtypes[number]}; convert it before fleet.init_worker()"
                )
            self._places[number] = parameter.data_ptr()
            self._views[number] = _view(parameter)
        return self._views[number]

    def _put(self, number: int, start: int, stop: int, values: NDArray[Any]) -> None:
        """Write to a parameter on another device or with other strides."""
        parameter = self._parameters[number].detach()
        arrived = as_tensor(values, parameter.dtype)
        if parameter.is_contiguous():
            staging_of(parameter.device).write(parameter.view(-1)[start:stop], arrived)
            return
        if start == 0 and stop == parameter.numel():
            parameter.copy_(arrived.view(parameter.shape))
            return
        whole = parameter.reshape(-1).to("cpu", copy=True)
        whole[start:stop] = arrived
        parameter.copy_(whole.view(parameter.shape))


def _view(parameter: Tensor) -> NDArray[Any] | None:
    in_order = parameter.is_contiguous() and not is_on_device(parameter)
    return flat_array(parameter) if in_order else None
