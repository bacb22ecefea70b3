# SPDX-License-Identifier: Apache-2.0
"""Values are restored exactly."""

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.checkpoint.formats.values import pack, unpack
from fleetlight.errors import CheckpointError

numbers = st.integers() | st.integers(2**63, 2**200) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["tuple", "float", "dict"]), inner)
    ),
    max_leaves=20,
)


def through_json(value: object, tensors: dict[str, torch.Tensor]) -> Any:
    return unpack(msgspec.json.decode(msgspec.json.encode(pack(value, "v", tensors))), tensors)


def exact(value: Any) -> Any:
    """The value with visible types and floats as bits, so that == means identical."""
    if isinstance(value, float):
        return ("nan",) if value != value else ("float", struct.pack("d", value))
    if isinstance(value, (list, tuple)):
        return (type(value), [exact(item) for item in value])
    if isinstance(value, dict):
        return (dict, [(exact(key), exact(item)) for key, item in value.items()])
    return (type(value), value)


@settings(deadline=None)
@given(values)
def test_values_survive_the_round_trip(value: object) -> None:
    assert exact(through_json(value, {})) == exact(value)


def test_nested_tensors_are_stored_separately() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [torch.ones(2), None], "b": (torch.zeros(()),)}
    found = through_json(value, tensors)
    assert set(tensors) == {"v.a.0", "v.b.0"}
    assert found["a"][0] is value["a"][0]
    assert isinstance(found["b"], tuple)


def test_two_tensors_never_share_a_name() -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = through_json({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, tensors)
    assert (found["a"]["b"].item(), found["a.b"].item()) == (1, 0)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "float32", "float64"])
def test_numpy_arrays_and_scalars_survive(dtype: str) -> None:
    array = np.array([1, 2, 3], dtype=dtype)
    found = through_json(array, {})
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    assert through_json(array[0], {}) == array[0].item()


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", print, np.zeros((2, 2)), 1j])
def test_an_unsupported_value_is_named(value: object) -> None:
    kind = type(value).__name__
    with pytest.raises(CheckpointError, match=rf"^w\.hook\.1 cannot be saved: got a {kind}"):
        pack({"hook": [0, value]}, "w", {})
