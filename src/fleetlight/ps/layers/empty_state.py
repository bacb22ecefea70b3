# SPDX-License-Identifier: Apache-2.0
"""Warns of a state dict without rows: the job would silently start from first values.

The hook is a module-level function, so that models with it can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fleetlight.observe.log import logger
from fleetlight.ps.layers.table_weight import TablePlaceholder, name_of

_has_warned = False


def reset_warning() -> None:
    """Warn of the next such state again."""
    global _has_warned
    _has_warned = False


def warn_without_rows(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Warn once of an empty table weight in a state dict, before the layer is loaded.

    In a job such an entry is an error. For a state of this process, `state_dict()` warned already.
    """
    global _has_warned
    weight, entry = getattr(module, "weight", None), state.get(f"{prefix}weight")
    if _has_warned or not isinstance(entry, Tensor) or isinstance(entry, TablePlaceholder):
        return
    if len(entry) or getattr(module, "handle", None) is not None:
        return
    _has_warned = True
    assert isinstance(weight, nn.Parameter)
    logger.warning(
        "load_state_dict: the state has no rows of table %s, nor of any other, so a job starts "
        "from their first values; take states by fleet.state_dict(model) and load them by "
        "fleet.load_state_dict(model, state) after fleet.init_worker(), or use "
        "fleet.save_persistables(dirname) and fleet.load_persistables(dirname)",
        name_of(weight),
    )
