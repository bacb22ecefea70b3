# SPDX-License-Identifier: Apache-2.0
"""A state without rows, loaded before a job: the job would begin with first values, unsaid.

The hook is a function of a module, so that models can be pickled with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fleetlight.observe.log import logger
from fleetlight.ps.layers.table_weight import TablePlaceholder, name_of

_has_warned = False


def warn_again() -> None:
    """The next such state is warned of anew."""
    global _has_warned
    _has_warned = False


def warn_of_no_rows(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Warn once of an entry that stood for a table in a file, before the layer is loaded.

    In a job such an entry is an error. A state of this process was warned of when it was taken.
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
        "load_state_dict: the state has no rows of table %s, nor of any other, and a job begins "
        "with first values of them; take states by fleet.state_dict(model) and load them by "
        "fleet.load_state_dict(model, state) after fleet.init_worker(), or use "
        "fleet.save_persistables(dirname) and fleet.load_persistables(dirname)",
        name_of(weight),
    )
