# SPDX-License-Identifier: Apache-2.0
"""Refuses a table whose rows would be saved under the name of another value of the model.

`fleet.state_dict`, checkpoints and `fleetlight export` save rows as `<table>.ids` and
`<table>.weight`, next to parameters and buffers: one of two values of a name would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fleetlight.errors import PlanError

_PARTS = ("weight", "ids")


def refuse_name_clash(model: nn.Module, tables: Mapping[str, list[Any]], prefix: str = "") -> None:
    """PlanError where a name of a table's rows is that of another value.

    Of several models, each is checked under its own names, without its `prefix`.
    """
    inside = {id(module): path for path, module in model.named_modules()}
    values = dict(_values(model))
    for table, layers in tables.items():
        mine = [layer for layer in layers if id(layer) in inside]
        weights = {id(layer.weight) for layer in mine}
        for part in _PARTS if mine else ():
            name = f"{table.removeprefix(prefix)}.{part}"
            if name in values and id(values[name]) not in weights:
                raise _refusal(model, table, inside[id(mine[0])], name)


def _values(model: nn.Module) -> Iterator[tuple[str, object]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _refusal(model: nn.Module, table: str, path: str, name: str) -> PlanError:
    owner = name.rpartition(".")[0]
    kind = type(model.get_submodule(owner)).__name__
    return PlanError(
        f"table {table!r} of layer {path or 'the model itself'} has the name of module {owner!r} "
        f"({kind}): its rows and a value of that module would both be saved as {name!r}; give the "
        f"layer another name for its table, such as table={table + '_rows'!r}"
    )
