# SPDX-License-Identifier: Apache-2.0
"""Arguments survive a round trip through JSON."""

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fleetlight.errors import CheckpointError
from fleetlight.static.files.arguments import pack, unpack

GRAPH = fx.Graph()
NODES = {name: GRAPH.placeholder(name) for name in ("x", "y")}

whole = st.integers(-(2**63), 2**63 - 1)
plain = (
    st.none()
    | st.booleans()
    | whole
    | st.floats()
    | st.text(max_size=20)
    | st.complex_numbers()
    | st.sampled_from(list(NODES.values()))
    | st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.complex64])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")])
    | st.sampled_from([torch.strided, torch.sparse_coo])
    | st.sampled_from([torch.contiguous_format, torch.channels_last, torch.preserve_format])
    | st.builds(slice, st.none() | whole, st.none() | whole, st.none() | whole)
)
arguments = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    text = msgspec.json.encode(pack(value, lambda node: node.name))
    return unpack(msgspec.json.decode(text), NODES)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same type, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, float):
        signs = math.copysign(1, one) == math.copysign(1, other) or math.isnan(one)
        return (one == other or (math.isnan(one) and math.isnan(other))) and signs
    return bool(one == other)


@given(arguments)
def test_an_argument_survives_the_round_trip(value: Any) -> None:
    assert same(round_trip(value), value)


def test_lists_of_torch_become_lists() -> None:
    node = GRAPH.call_function(torch.add, ([1, NODES["x"]], {"a": 2}))
    assert round_trip(node.args) == ([1, NODES["x"]], {"a": 2})
    assert round_trip(torch.Size([2, 3])) == (2, 3)


def test_devices_can_be_replaced() -> None:
    packed = pack([torch.device("cuda:1"), torch.float32], lambda node: node.name)
    assert unpack(packed, {}, torch.device("cpu")) == [torch.device("cpu"), torch.float32]


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(1), len])
def test_arguments_without_json_form_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"got an argument of type {type(value).__name__}"):
        pack([value], lambda node: node.name)


@pytest.mark.parametrize(
    "value", [{"dtype": "nn"}, {"layout": "float32"}, {"node": "z"}, {"call": 1}, {"a": 1, "b": 2}]
)
def test_malformed_arguments_are_refused(value: Any) -> None:
    with pytest.raises((KeyError, ValueError)):
        unpack(value, NODES)
