# SPDX-License-Identifier: Apache-2.0
"""Tensors are restored bit for bit, and safetensors reads the files."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetlight.checkpoint.formats.tensors import (
    CODES,
    describe_tensors,
    read_tensors,
    write_tensors,
)
from fleetlight.checkpoint.storage.files import Sink
from fleetlight.errors import CheckpointError, CorruptCheckpointError


def written(tensors: dict[str, Tensor]) -> bytes:
    out = io.BytesIO()
    write_tensors(out, tensors)
    return out.getvalue()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    """Arbitrary bits, NaNs included; booleans must be 0 or 1."""
    count = int(np.prod(shape)) * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (count,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


tensors = st.builds(
    random_tensor,
    st.sampled_from(list(CODES)),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 2**32),
)
names = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda n: n != "__metadata__")


@settings(deadline=None)
@given(st.dictionaries(names, tensors, max_size=5))
def test_tensors_survive_the_round_trip(state: dict[str, Tensor]) -> None:
    found = safetensors.torch.load(written(state))
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def test_views_of_all_kinds_are_written(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    wave = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {
        "base": base,
        "transposed": base.T,
        "slice": base[1:, ::2],
        "expanded": base[0, 0].expand(5),
        "conj": wave.conj(),
        "neg": torch._neg_view(torch.ones(3)),
        "parameter": torch.nn.Parameter(base),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    with Sink(tmp_path / "t") as sink:
        write_tensors(sink, state)
    found = read_tensors(tmp_path / "t")
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor.detach()), name


def test_data_is_aligned() -> None:
    data = written({"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(3).double()})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["b"]["data_offsets"] == [0, 24]
    assert header["a"]["data_offsets"] == [24, 25]
    assert header["__metadata__"] == {"format": "pt"}


def test_a_tensor_is_written_without_a_copy() -> None:
    class Writer:
        shared = False

        def write(self, data: bytes | memoryview) -> None:
            if isinstance(data, memoryview):
                self.shared = np.shares_memory(np.frombuffer(data, np.uint8), tensor.numpy())

    tensor = torch.ones(1000)
    writer = Writer()
    write_tensors(writer, {"a": tensor})
    assert writer.shared


def test_entries_describe_tensors() -> None:
    (entry,) = describe_tensors({"a": torch.ones(2, 3).bfloat16()}, "buffer", "f")
    assert (entry.name, entry.kind, entry.dtype, entry.shape) == ("a", "buffer", "bfloat16", (2, 3))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2).to_sparse(), r"got a torch.sparse_coo torch.float32 tensor"),
        (torch.ones(2, dtype=torch.complex128), "got a torch.strided torch.complex128"),
        (torch.ones(2, device="meta"), "on meta, expected a dense one with data"),
        (torch.nn.UninitializedParameter(), "has no shape yet; run the model once"),
    ],
)
def test_an_unsupported_tensor_is_named(tensor: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"'layer.w' .*{message}"):
        written({"layer.w": tensor})


def test_a_tensor_subclass_is_named() -> None:
    class Scaled(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match="'w' cannot be saved: got a Scaled"):
        written({"w": torch.ones(2).as_subclass(Scaled)})


def test_a_reserved_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="named '__metadata__' cannot be saved"):
        written({"__metadata__": torch.ones(1)})


def test_a_file_that_is_not_safetensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"garbage" * 10)
    with pytest.raises(CorruptCheckpointError, match="t is not a safetensors file"):
        read_tensors(tmp_path / "t")
