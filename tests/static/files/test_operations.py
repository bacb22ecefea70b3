# SPDX-License-Identifier: Apache-2.0
"""A file can name operations of torch and of Fleetlight, and nothing else in the process."""

import importlib
import math
import operator
import os
from typing import Any

import pytest
import torch

from fleetlight.errors import CheckpointError
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
