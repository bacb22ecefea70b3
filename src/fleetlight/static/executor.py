# SPDX-License-Identifier: Apache-2.0
"""`Executor`: runs programs by the names of their feeds and fetches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetlight.static.feeds import accept
from fleetlight.static.program import Program


class Executor:
    """Runs the code that torch.fx generates from a program; no compiler is needed."""

    def run(
        self, program: Program, feed: Mapping[str, Any], fetch_list: Sequence[str] = ()
    ) -> list[Tensor]:
        """One step; answers what is in `fetch_list`."""
        tensors = accept(program.feeds, feed)
        code = program.compiled(fetch_list)
        for slot in program.state:
            slot.refresh()
        with torch.no_grad():
            return code(*(slot.tensor for slot in program.state), *tensors)
