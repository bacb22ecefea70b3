# SPDX-License-Identifier: Apache-2.0
"""`WorkerState`: the state of one worker, as files and as bytes to send to worker 0."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fleetlight.checkpoint.formats.tensors import describe_tensors, write_tensors
from fleetlight.checkpoint.formats.values import Json, pack, unpack
from fleetlight.checkpoint.state.rng import RngState
from fleetlight.checkpoint.storage.files import FileTarget
from fleetlight.checkpoint.storage.manifest import TensorEntry
from fleetlight.errors import CorruptCheckpointError

#: errors of decoding a damaged record
_NONSENSE = (
    msgspec.DecodeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class _Record(msgspec.Struct, frozen=True):
    """The JSON file of a worker."""

    rank: int
    rng: RngState | None
    values: dict[str, Json]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerState:
    """One worker's random numbers, sampler positions, loss scaler, and the like."""

    rank: int
    rng: RngState | None = None
    #: name -> state, e.g. {"sampler": ..., "scaler": scaler.state_dict()}; tensors may be inside
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: tensors of the worker itself, e.g. the residuals of a gradient codec
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Everything in one message; `from_bytes` gives it back. No pickle on the way."""
        record, tensors = _split(self)
        out = io.BytesIO()
        out.write(len(record).to_bytes(8, "little") + record)
        write_tensors(out, tensors)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> WorkerState:
        """The state that `to_bytes` was called on."""
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            tensors = safetensors.torch.load(data[end:])
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise CorruptCheckpointError(f"a worker's state is damaged: {error}") from error
        return _join(data[8:end], tensors, "a worker's state")


def record_file(rank: int) -> str:
    """The name of a worker's JSON file."""
    return f"worker-{rank:05d}.json"


def tensor_file(rank: int) -> str:
    """The name of a worker's tensor file; it exists only if there are tensors."""
    return f"worker-{rank:05d}.safetensors"


def write_worker(target: FileTarget, state: WorkerState) -> list[TensorEntry]:
    """Write one worker's files."""
    record, tensors = _split(state)
    with target.create(record_file(state.rank)) as sink:
        sink.write(record)
    if not tensors:
        return []
    with target.create(tensor_file(state.rank)) as sink:
        write_tensors(sink, tensors)
    return describe_tensors(tensors, "worker", tensor_file(state.rank))


def read_worker(path: Path, tensors: Mapping[str, Tensor]) -> WorkerState:
    """A worker's state from its JSON file and the tensors of the other."""
    return _join(path.read_bytes(), tensors, str(path))


def _split(state: WorkerState) -> tuple[bytes, dict[str, Tensor]]:
    """The record as JSON, and all tensors: the worker's own, and those found inside `values`."""
    tensors = {f"tensors.{name}": tensor for name, tensor in state.tensors.items()}
    values = {
        key: pack(value, f"worker {state.rank} values.{key}", tensors)
        for key, value in state.values.items()
    }
    return msgspec.json.encode(_Record(state.rank, state.rng, values)), tensors


def _join(data: bytes, tensors: Mapping[str, Tensor], where: str) -> WorkerState:
    try:
        record = msgspec.json.decode(data, type=_Record)
        values = {key: unpack(value, tensors) for key, value in record.values.items()}
    except _NONSENSE as error:
        raise CorruptCheckpointError(f"{where} is damaged: {error!r}") from error
    own = {
        name.removeprefix("tensors."): tensor
        for name, tensor in tensors.items()
        if name.startswith("tensors.")
    }
    return WorkerState(rank=record.rank, rng=record.rng, values=values, tensors=own)
