# SPDX-License-Identifier: Apache-2.0
"""What type checkers see of a registered optimizer.

No such object is made: `distributed_optimizer` answers the optimizer it was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    import torch
    from torch import Tensor

    class DistributedOptimizer(torch.optim.Optimizer, Any):  # type: ignore[misc]
        """A torch optimizer with `minimize`.

        Python's types have no word for "the class that came in, with a method more". Of a base
        that may be anything, it fits a variable of the optimizer's own class.
        """

        def minimize(
            self,
            loss: Tensor,
            *fleet: object,
            clip_norm: float | None = None,
            clip_value: float | None = None,
        ) -> None:
            """Backward and step; of a static program's loss, they are written into the program."""
