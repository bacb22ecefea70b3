# SPDX-License-Identifier: Apache-2.0
"""Refuses a weight that a sparse embedding shares with a module of another kind."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fleetlight.errors import PlanError
from fleetlight.fleet.plan.remote_embedding import is_movable
from fleetlight.ps.layers.embedding import TableLayer


def refuse_tied(model: nn.Module, *, served: bool) -> None:
    """PlanError where a module with a dense weight shares it with a sparse embedding.

    With servers the rows move. Without servers, backward makes a dense gradient where all workers
    expect a sparse one.
    """
    sparse = {id(layer.weight): path for path, layer in _named(model) if _is_sparse(layer)}
    for path, module in _named(model):
        if _is_sparse(module):
            continue
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owner = sparse.get(id(parameter))
            if owner is not None:
                layer = model.get_submodule("" if owner == _ROOT else owner)
                raise _refusal(owner, layer, f"{path} ({type(module).__name__})", name, served)


_ROOT = "the model itself"


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path or _ROOT, module) for path, module in model.named_modules())


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, TableLayer) or is_movable(module)


def _refusal(path: str, layer: nn.Module, other: str, name: str, served: bool) -> PlanError:
    kind = type(layer).__name__
    if isinstance(layer, TableLayer):
        return PlanError(
            f"{path}: the rows of {kind} are on the parameter servers, but {other} uses its weight "
            f"too, as {name}; compute with rows, such as hidden @ fleet.rows({path}, ids).T, or "
            "use torch.nn.Embedding(sparse=False) for a shared weight"
        )
    why = (
        f"the rows of {kind}(sparse=True) move to the parameter servers"
        if served
        else f"{kind}(sparse=True) has sparse gradients"
    )
    stays = " to keep it on the workers" if served else ""
    return PlanError(
        f"{path}: {why}, but {other} uses its weight too, as {name}; build {path} with "
        f"sparse=False{stays}"
    )
