# SPDX-License-Identifier: Apache-2.0
"""`Rule`: how a row changes with its gradient. Each file of `kernels/rules` declares a rule.

Rules compute what torch does with coalesced gradients: SGD, Adagrad, AdamW, and SparseAdam for
Adam. Updates are lazy: momentum and weight decay act only on rows with a gradient. The step number
comes with each call, because rows do not count steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Doubles, Floats, Values

Options: TypeAlias = Mapping[str, Any]
#: the hyper-parameters inside a kernel
Numbers: TypeAlias = tuple[np.float32, np.float32, np.float32, np.float32, np.float32]
#: Updates one row of the flat slab. The weights start at the second argument, followed by the
#: state; the gradient starts at the fifth.
Step: TypeAlias = Callable[[Floats, np.uint64, np.uint64, Values, np.uint64, Numbers], None]
Array: TypeAlias = NDArray[np.float64]
#: (weights, state, gradients, hyper-parameters) -> weights and state of all rows after one step
Twin: TypeAlias = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
#: hyper-parameters of a call; all rules have the same number, padded with zeros
HYPER = 5


@dataclasses.dataclass(frozen=True)
class Rule:
    """The arithmetic of an update, its state, and the optimizers that it replaces."""

    name: str
    step: Step = dataclasses.field(repr=False)
    twin: Twin = dataclasses.field(repr=False)
    #: from the options of a param group and the number of the step, counted from 1
    hyper_parameters: Callable[[Options, int], tuple[float, ...]] = dataclasses.field(repr=False)
    #: torch's names of the state with one number for each weight
    weight_state: tuple[str, ...] = ()
    #: the names of the state with one number for each row
    row_state: tuple[str, ...] = ()
    #: the option with the initial state of a new row
    initial_option: str = ""
    #: True if the hyper-parameters depend on the step number
    counts_steps: bool = False
    #: torch's defaults for a layer that names this rule; None: layers cannot name it
    layer_options: Mapping[str, float] | None = None
    #: By the name of a class of torch.optim or fleet.optim: a function that returns the fixed
    #: options of a param group, or None if the group needs another rule.
    optimizers: Mapping[str, Callable[[Options], dict[str, float] | None]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    #: options of those classes that must stay 0 under this rule
    zero_options: tuple[str, ...] = ()
    #: the initial state of a new row
    initial: float = 0.0

    def state_width(self, dim: int) -> int:
        """The number of floats of state in a row."""
        return len(self.weight_state) * dim + len(self.row_state)

    def hyper(self, options: Options, step: int = 1) -> Doubles:
        """The hyper-parameters that `push` takes, from the options of a param group."""
        numbers = self.hyper_parameters(options, step)
        return np.array([*numbers, *[0.0] * (HYPER - len(numbers))], np.float64)


def lr_and_decay(options: Options) -> tuple[float, float]:
    """The first two hyper-parameters of most rules."""
    return float(options["lr"]), float(options.get("weight_decay", 0.0))
