# SPDX-License-Identifier: Apache-2.0
"""The random number generators of a process: Python's, NumPy's global one, and torch's."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch
from torch import Tensor

from fleetlight.checkpoint.values import Json, pack, unpack


class RngState(msgspec.Struct, frozen=True):
    """Where every generator of a process stands."""

    python: Json
    numpy: Json
    torch: bytes
    cuda: list[bytes] = []


def rng_state() -> RngState:
    """The state of all generators; CUDA's only if this process uses CUDA."""
    return RngState(
        python=pack(random.getstate(), "python", {}),
        numpy=pack(np.random.get_state(legacy=False), "numpy", {}),
        torch=_to_bytes(torch.get_rng_state()),
        cuda=[_to_bytes(torch.cuda.get_rng_state(i)) for i in _cuda_devices()],
    )


def set_rng_state(state: RngState) -> None:
    """Set every generator back; devices that are not here any more are left out."""
    random.setstate(unpack(state.python, {}))
    np.random.set_state(unpack(state.numpy, {}))
    torch.set_rng_state(_to_tensor(state.torch))
    for index, saved in zip(range(torch.cuda.device_count()), state.cuda, strict=False):
        torch.cuda.set_rng_state(_to_tensor(saved), index)


def _cuda_devices() -> range:
    # Asking for their state in a process that has not used CUDA would start it on every device.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return range(torch.cuda.device_count() if used else 0)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
