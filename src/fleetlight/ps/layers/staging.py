# SPDX-License-Identifier: Apache-2.0
"""Copies between main memory and a device; those of a GPU run beside its computation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: waits for a copy, and returns the tensor in main memory
Arrival = Callable[[], Tensor]


def is_on_device(tensor: Tensor) -> bool:
    """False for a tensor in main memory."""
    return not tensor.is_cpu


class Staging(Protocol):
    """The copies of one device."""

    def to_device(self, array: NDArray[Any]) -> Tensor:
        """The values of an array on the device; work that is queued later finds them there."""

    def to_host(self, tensor: Tensor) -> Arrival:
        """Start to copy a tensor of the device, once the work queued so far is done."""

    def write(self, target: Tensor, values: Tensor) -> None:
        """Write values of main memory into a tensor of the device."""

    def after(self, stream: object) -> object:
        """Let the current stream wait for the work of another one; return the current stream."""


@functools.cache
def staging_of(device: torch.device) -> Staging:
    """The copies of a device, one object in a process."""
    return CudaStaging(device) if device.type == "cuda" else BlockingStaging(device)


class BlockingStaging:
    """Copies that the caller waits for: of devices without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, array: NDArray[Any]) -> Tensor:
        """Copy an array."""
        return torch.from_numpy(np.array(array)).to(self._device)

    def to_host(self, tensor: Tensor) -> Arrival:
        """Copy a tensor."""
        copied = tensor.detach().to("cpu", copy=True)
        return lambda: copied

    def write(self, target: Tensor, values: Tensor) -> None:
        """Copy values."""
        target.copy_(values)

    def after(self, stream: object) -> object:
        """Do nothing: the caller has waited for all work."""
        return None


class CudaStaging:
    """Copies through pinned memory: on two streams, one for each direction.

    Torch's allocators reuse memory once the streams named here have used it, pinned memory too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._in, self._out = stream(device), stream(device)

    def to_device(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to pinned memory and queue its copy to the GPU."""
        pinned = _pinned(array.shape, torch.from_numpy(np.empty(0, array.dtype)).dtype)
        # the array may be read-only, so torch cannot copy it
        pinned.numpy()[...] = array
        with torch.cuda.stream(self._in):
            tensor = pinned.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._in)
        tensor.record_stream(current)
        return tensor

    def to_host(self, tensor: Tensor) -> Arrival:
        """Queue a copy to pinned memory after the current stream's work."""
        pinned = _pinned(tensor.shape, tensor.dtype)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            pinned.copy_(tensor.detach(), non_blocking=True)
            done = self._out.record_event()
        tensor.record_stream(self._out)

        def arrived() -> Tensor:
            done.synchronize()
            return pinned

        return arrived

    def write(self, target: Tensor, values: Tensor) -> None:
        """Queue the write on the current stream, after the reads of the target's old values."""
        target.copy_(_pinned(values.shape, values.dtype).copy_(values), non_blocking=True)

    def after(self, stream: Any) -> object:
        """Order the work of the current stream after that of another one."""
        current = torch.cuda.current_stream(self._device)
        if stream is not None and stream != current:
            current.wait_stream(stream)
        return current


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)
