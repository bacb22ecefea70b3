# SPDX-License-Identifier: Apache-2.0
"""Warns of `model.state_dict()` and pickles without the rows that are on servers.

`load_state_dict` refuses a state with entries of tables. The hooks are torch's own, and functions
of this module, so that models can be pickled with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fleetlight.errors import PlanError
from fleetlight.observe.log import logger
from fleetlight.ps.layers.empty_state import reset_warning
from fleetlight.ps.layers.table_weight import TableWeight, name_of

_has_warned = False
_has_warned_of_pickle = False


def watch_state_dicts(models: Sequence[nn.Module], layers: Sequence[nn.Module]) -> None:
    """Watch `state_dict` and `load_state_dict` of models whose tables are on servers."""
    global _has_warned, _has_warned_of_pickle
    _has_warned = _has_warned_of_pickle = False
    reset_warning()
    for layer in layers:
        layer.register_state_dict_post_hook(_warn)  # type: ignore[no-untyped-call]
    for module in {id(module): module for module in (*models, *layers)}.values():
        module.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _warn(module: nn.Module, state: Mapping[str, Any], prefix: str, _: Any) -> None:
    """Warn once, unless the state has the live weight itself."""
    global _has_warned
    if _has_warned or state.get(f"{prefix}weight") is module.weight:
        return
    _has_warned = True
    logger.warning(
        "state_dict() has no rows of table %s, nor of any other: they are on the parameter "
        "servers; let all workers call fleet.state_dict(model) for all values, or "
        "fleet.save_persistables(dirname), whose files fleetlight export merges into one",
        _name(module),
    )


def warn_of_pickle(table: str) -> None:
    """Warn once of a model that is pickled with a layer of the table."""
    global _has_warned_of_pickle
    if _has_warned_of_pickle:
        return
    _has_warned_of_pickle = True
    logger.warning(
        "a pickled model, such as that of torch.save(model), has no rows of table %s, nor of any "
        "other: they are on the parameter servers; let all workers call fleet.state_dict(model) "
        "for all values, or fleet.save_persistables(dirname), whose files fleetlight export merges "
        "into one",
        table,
    )


def _refuse(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state with entries of tables before any module changes.

    For a module that is not registered, torch may load other modules before it runs this hook.
    """
    for path, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        entry = state.get(f"{prefix}{path}.weight" if path else f"{prefix}weight")
        if isinstance(weight, TableWeight) and entry is not None and entry is not weight:
            raise PlanError(
                f"load_state_dict has an entry for table {_name(layer)}, but its rows are on the "
                "parameter servers, which do not receive it: let all workers call "
                "fleet.load_state_dict(model, state) with a state of fleet.state_dict(model), or "
                "fleet.load_persistables(dirname)"
            )


def _name(layer: nn.Module) -> str:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return name_of(weight)
