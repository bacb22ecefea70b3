# SPDX-License-Identifier: Apache-2.0
"""A file can name operations of torch and of Fleetlight, and nothing else in the process."""

import importlib
import math
import operator
import os
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fleetlight.errors import CheckpointError
from fleetlight.static.files.arguments import pack, unpack
from fleetlight.static.files.operations import _FUNCTIONS, name_of, operation

KNOWN = [
    torch.ops.aten.mm.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.__and__.Tensor,
    torch.ops.prims.convert_element_type.default,
    torch.ops.fleetlight.gradient.default,
    operator.getitem,
    operator.floordiv,
    math.ceil,
    torch.sym_max,
]


@pytest.mark.parametrize("target", KNOWN, ids=name_of)
def test_an_operation_is_found_by_its_name(target: Any) -> None:
    assert operation(name_of(target)) is target


REFUSED = [
    *("os.system", "builtins.eval", "operator.methodcaller", "operator.attrgetter", "math.dist"),
    *("aten.from_file.default", "aten.__class__.mro", "aten.mm", "aten.mm.default.decompose"),
    *("torch.load", "profiler._record_function_enter.default", "", ".", "aten..default"),
]


@pytest.mark.parametrize("name", REFUSED)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=repr(name)):
        operation(name)


@pytest.mark.parametrize(
    "target", [os.system, torch.ops.aten.from_file.default, operator.methodcaller]
)
def test_other_operations_are_not_written(target: Any) -> None:
    with pytest.raises(CheckpointError, match="a program in a file may not have the operation"):
        name_of(target)


def test_an_operation_of_another_torch_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=rf"unknown to torch {torch.__version__}".split("+")[0]
    ):
        operation("aten.mm_of_the_future.default")


def test_all_own_operations_are_known_except_those_of_tables() -> None:
    for module in ("graph.lookups", "ops.rows", "ops.marks", "ops.norms", "ops.reductions"):
        importlib.import_module(f"fleetlight.static.{module}")
    importlib.import_module("fleetlight.static.coding")
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fleetlight::")]
    unknown = [name for name in names if f"{name.replace('::', '.')}.default" not in _FUNCTIONS]
    assert len(names) - len(unknown) == 8
    tables = ("row", "bag", "look_up", "table", "each")
    assert [name for name in unknown if not any(word in name for word in tables)] == []


# -- arguments survive a round trip through JSON --------------------------------------------------

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
