# SPDX-License-Identifier: Apache-2.0
"""Tensors to safetensors and back.

The library reads; writing is done here, because its writer holds a CPU copy of every tensor at
once and knows no checksum. Here one tensor at a time leaves its device, and the checksum is made
from the bytes as they pass.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetlight.checkpoint.storage.files import Writable
from fleetlight.checkpoint.storage.manifest import TensorEntry
from fleetlight.errors import CheckpointError, CorruptCheckpointError

CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclasses.dataclass(frozen=True)
class StreamedTensor:
    """A tensor that never is in memory as a whole: its values come in pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]

    def numel(self) -> int:
        """As of a tensor."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """As of a tensor."""
        return self.dtype.itemsize


def write_tensors(
    out: Writable,
    tensors: Mapping[str, Tensor | StreamedTensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file; tensors may share memory, be on any device and have any strides."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            refuse_unstorable(name, tensor)
    # The widest first, so that every tensor is aligned in a file that is mapped into memory.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    out.write(_header(names, tensors, {"format": "pt", **(metadata or {})}))
    for name in names:
        tensor = tensors[name]
        for piece in (tensor,) if isinstance(tensor, Tensor) else tensor.pieces():
            if piece.numel():
                out.write(_raw(piece))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, mapped into memory: pages are read when they are touched."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(f"{path} is not a safetensors file: {error}") from error


def describe_tensors(tensors: Mapping[str, Tensor], kind: str, file: str) -> list[TensorEntry]:
    """Manifest entries of tensors of one kind."""
    return [
        TensorEntry(name, kind, dtype_name(tensor.dtype), tuple(tensor.shape), file)
        for name, tensor in tensors.items()
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def refuse_unstorable(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that a file cannot hold."""
    if name == "__metadata__":
        raise CheckpointError("a tensor named '__metadata__' cannot be saved; rename it")
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"{name!r} has no shape yet; run the model once before saving it")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in CODES:
        raise CheckpointError(
            f"{name!r} cannot be saved: got a {tensor.layout} {tensor.dtype} tensor on "
            f"{tensor.device}, expected a dense one with data and of one of: "
            + ", ".join(dtype_name(dtype) for dtype in CODES)
        )
    if type(tensor.data) is not Tensor:
        raise CheckpointError(
            f"{name!r} cannot be saved: got a {type(tensor.data).__name__}, expected a plain tensor"
        )


def _header(
    names: list[str], tensors: Mapping[str, Tensor | StreamedTensor], metadata: Mapping[str, str]
) -> bytes:
    """The length-prefixed JSON header, padded so that the data starts aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
