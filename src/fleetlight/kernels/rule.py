# SPDX-License-Identifier: Apache-2.0
"""`Rule`: how the rows of a table learn. Each file of `kernels/rules` declares one.

Rules act as torch does on coalesced gradients: SGD, Adagrad, and SparseAdam for Adam. Only rows
that have a gradient change: momentum and weight decay reach a row when it is touched. The step
count comes with each call, because a row does not know how often others learned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Doubles, Floats, Values

Options: TypeAlias = Mapping[str, Any]
#: the hyper-parameters as a kernel sees them
Numbers: TypeAlias = tuple[np.float32, np.float32, np.float32, np.float32, np.float32]
#: Changes one row of the flat slab: the weights begin at the second argument and the state follows
#: them; the gradient begins at the fifth.
Step: TypeAlias = Callable[[Floats, np.uint64, np.uint64, Values, np.uint64, Numbers], None]
Array: TypeAlias = NDArray[np.float64]
#: (weights, state, gradients, hyper-parameters) -> weights and state of all rows after one step
Twin: TypeAlias = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
#: hyper-parameters of a call; all rules have the same number, padded with zeros
HYPER = 5


@dataclasses.dataclass(frozen=True)
class Rule:
    """One way to learn: its arithmetic, its state, and the optimizers it stands for."""

    name: str
    step: Step = dataclasses.field(repr=False)
    twin: Twin = dataclasses.field(repr=False)
    #: from the options of a param group and the number of the step, counted from 1
    hyper_parameters: Callable[[Options, int], tuple[float, ...]] = dataclasses.field(repr=False)
    #: the names, as torch has them, of state with a number for each weight
    weight_state: tuple[str, ...] = ()
    #: the names of state with one number for a row
    row_state: tuple[str, ...] = ()
    #: the option that says what the state of a new row is
    initial_option: str = ""
    #: True when the hyper-parameters change with the step
    counts_steps: bool = False
    #: torch's defaults for a layer that names this rule; None: layers cannot
    layer_options: Mapping[str, float] | None = None
    #: By the name of a class of torch.optim: the options of a param group that never change, or
    #: None where the group needs another rule.
    optimizers: Mapping[str, Callable[[Options], dict[str, float] | None]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    #: options of those classes that must stay 0 under this rule
    zero_options: tuple[str, ...] = ()
    #: what the state of a new row is
    initial: float = 0.0

    def state_width(self, dim: int) -> int:
        """Floats of state beside the weights of a row."""
        return len(self.weight_state) * dim + len(self.row_state)

    def hyper(self, options: Options, step: int = 1) -> Doubles:
        """The hyper-parameters that `push` takes, from the options of a param group."""
        numbers = self.hyper_parameters(options, step)
        return np.array([*numbers, *[0.0] * (HYPER - len(numbers))], np.float64)


def lr_and_decay(options: Options) -> tuple[float, float]:
    """The first two hyper-parameters of most rules."""
    return float(options["lr"]), float(options.get("weight_decay", 0.0))
