# SPDX-License-Identifier: Apache-2.0
"""The random number generators of a process: Python's, NumPy's global one, and torch's."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from fleetlight.checkpoint.formats.values import Json, pack, unpack

#: 624 words and a position
_MT19937_BYTES = 4 * 625


class RngState(msgspec.Struct, frozen=True):
    """The state of every generator of a process."""

    python: Json
    numpy: Json
    torch: bytes
    cuda: list[bytes] = []


def rng_state() -> RngState:
    """The state of all generators; CUDA's only if this process uses CUDA."""
    python = pack(random.getstate(), "python", {})
    return _with_torch(python, pack(np.random.get_state(legacy=False), "numpy", {}))


class RngStateCache:
    """Encodes the state repeatedly; generators that were not used since cost little."""

    def __init__(self) -> None:
        self._python: tuple[int, msgspec.Raw] | None = None
        self._numpy: tuple[bytes, msgspec.Raw] | None = None

    def state(self) -> RngState:
        """The state of all generators now."""
        return _with_torch(self._python_state(), self._numpy_state())

    def _python_state(self) -> msgspec.Raw:
        state = random.getstate()
        # of 625 numbers, which take longer to compare
        seen = hash(state)
        if self._python is None or self._python[0] != seen:
            self._python = seen, _encoded(state, "python")
        return self._python[1]

    def _numpy_state(self) -> msgspec.Raw:
        seen = _numpy_memory()
        if self._numpy is None or self._numpy[0] != seen:
            state: Any = np.random.get_state(legacy=False)
            encoded = _encoded(state, "numpy")
            if not seen or state["has_gauss"]:
                # a cached normal number comes next, and is not in the generator's memory
                return encoded
            self._numpy = seen, encoded
        return self._numpy[1]


def _with_torch(python: Json, numpy: Json) -> RngState:
    return RngState(
        python=python,
        numpy=numpy,
        torch=_to_bytes(torch.get_rng_state()),
        cuda=[_to_bytes(torch.cuda.get_rng_state(i)) for i in _cuda_devices()],
    )


def _encoded(state: object, name: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(pack(state, name, {})))


def _numpy_memory() -> bytes:
    """The memory that changes when NumPy's generator draws; b"" for a generator of another kind.

    NumPy builds a state number by number, which takes longer than all the rest.
    """
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        return b""
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def set_rng_state(state: RngState) -> None:
    """Restore every generator; devices that no longer exist are skipped."""
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
