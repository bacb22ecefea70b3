# SPDX-License-Identifier: Apache-2.0
"""Only torch_compat uses private names of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
from tests.tidy.sources import PACKAGE, SOURCES, parsed, relative
from torch import fx, nn

COMPAT = PACKAGE / "torch_compat"
#: imports numpy and numba only
KERNELS = PACKAGE / "kernels"
#: modules of torch without an underscore that are not stable either
UNPROMISED = {"torch.fx.experimental"}
#: optional attributes that torch looks for on objects
SOMETIMES = {
    *(
        "_step_supports_amp_scaling",
        "_opt_called",
        "_metadata",
        "_per_optimizer_states",
        "_wrapped_by_lr_sched",
    ),
    *("_execution_engine", "_rebuild_buckets", "_check_reducer_finalized", "_erased", "_op"),
}
#: functions that look an attribute up by name
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
#: the names of a method's object
SELF = {"self", "cls"}
#: objects on which private names are often used
LINEAR = nn.Linear(1, 1)
OBJECTS = (
    *(torch, torch.Tensor, nn.Parameter(torch.ones(1)), LINEAR, nn.BatchNorm1d(1), fx.Graph()),
    *(fx.Graph().placeholder("x"), torch.ops.aten.add, torch.ops.aten.add.Tensor),
    *(torch.optim.SGD(LINEAR.parameters()), torch.amp.GradScaler("cpu"), torch.distributed),
    *(torch.optim.lr_scheduler.LRScheduler, torch.distributed.distributed_c10d, torch.compiler),
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def own_names(tree: ast.AST) -> set[str]:
    """Names that the file itself defines: functions, classes and fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def names_on_self(tree: ast.AST) -> set[str]:
    """Attributes that the file sets on self; on other objects they may belong to torch."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) in SELF
    }


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of torch."""
    own, on_self = own_names(tree), names_on_self(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if any(map(is_private, full.split("."))) or any(map(full.startswith, UNPROMISED)):
                    yield node.lineno, full
        elif isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names):
                if name.startswith("torch.") and any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            if _is_torchs(base, node.attr, own | on_self if base in SELF else own):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield node.lineno, ast.unparse(node)


def _is_torchs(base: str, name: str, own: set[str]) -> bool:
    if base.split(".")[0] in ("torch", "dist", "_aten"):
        return True
    return name not in own and (name in SOMETIMES or any(hasattr(thing, name) for thing in OBJECTS))


@pytest.mark.style
@pytest.mark.slow
def test_private_names_of_torch_stay_in_torch_compat() -> None:
    guilty = [
        f"{relative(path)}:{line}: {name}"
        for path in SOURCES
        if not {COMPAT, KERNELS} & set(path.parents)
        for line, name in private_uses(parsed(path))
    ]
    assert not guilty


@pytest.mark.parametrize(
    "source",
    [
        "from torch._subclasses import FakeTensor",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "torch._foreach_add_([], 1)",
        "torch.distributed.distributed_c10d._world",
        "tensor._version",
        "module._parameters",
        "graph._root",
        "Tensor._make_wrapper_subclass(cls, ())",
        "optimizer._step_supports_amp_scaling = True",
        "getattr(torch, '_disable_dynamo', None)",
        "self._buffers = [name for name in part._buffers]",
    ],
)
def test_private_name_is_found(source: str) -> None:
    assert list(private_uses(ast.parse(source)))


def test_own_private_names_are_allowed() -> None:
    source = "class A:\n  def _version(self, other): return other._version\nimport os\nos._exit(0)"
    assert not list(private_uses(ast.parse(source)))
    assert not list(private_uses(ast.parse("self._buffers = []; print(self._buffers)")))
