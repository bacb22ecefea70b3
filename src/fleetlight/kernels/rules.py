# SPDX-License-Identifier: Apache-2.0
"""The rules by which a table's rows learn, and their names.

They are torch's on coalesced gradients: SGD, Adagrad, and SparseAdam for Adam. Only rows that have
a gradient change: momentum and weight decay reach a row when it is touched. The step of Adam and of
Adagrad's decaying rate is given with the call: a row does not know how often others learned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.kernels.arrays import Doubles

Options = Mapping[str, Any]
#: numbers a rule is given with each call, the same count for all rules
HYPER = 5


@dataclasses.dataclass(frozen=True)
class Rule:
    """One way to learn: what it keeps for a row, and its numbers from an optimizer's options."""

    name: str
    per_weight: int  #: floats kept for each weight
    per_row: int  #: floats kept for each row
    numbers: Callable[[Options, int], tuple[float, ...]] = dataclasses.field(repr=False)
    initial: float = 0.0  #: what a new row's state is filled with

    def state_width(self, dim: int) -> int:
        """Floats kept beside the weights of a row."""
        return self.per_weight * dim + self.per_row

    @property
    def counts_steps(self) -> bool:
        """Whether its numbers are others in each step."""
        return self.name in ("adam", "adagrad", "rowwise_adagrad")

    def hyper(self, options: Options, step: int = 1) -> Doubles:
        """What `push` needs to know, from the options of an optimizer's parameter group."""
        numbers = self.numbers(options, step)
        return np.array([*numbers, *[0.0] * (HYPER - len(numbers))], np.float64)


def rule_named(name: str, options: Options | None = None) -> Rule:
    """The rule of that name; `options` may say what an accumulator starts with."""
    if name not in RULES:
        raise ConfigError(f"rule {name!r}: {did_you_mean(name, RULES)}")
    initial = float((options or {}).get("initial_accumulator_value", 0.0))
    rule = RULES[name]
    return dataclasses.replace(rule, initial=initial) if name.endswith("adagrad") else rule


def _lr_and_decay(options: Options) -> tuple[float, float]:
    return float(options["lr"]), float(options.get("weight_decay", 0.0))


def _sgd(options: Options, step: int) -> tuple[float, ...]:
    return _lr_and_decay(options)


def _momentum(options: Options, step: int) -> tuple[float, ...]:
    momentum, nesterov = float(options.get("momentum", 0.0)), bool(options.get("nesterov", False))
    return (*_lr_and_decay(options), momentum, float(nesterov))


def _adagrad(options: Options, step: int) -> tuple[float, ...]:
    lr, decay = _lr_and_decay(options)
    rate = lr / (1 + (step - 1) * float(options.get("lr_decay", 0.0)))
    return rate, decay, float(options.get("eps", 1e-10))


def _adam(options: Options, step: int) -> tuple[float, ...]:
    lr, decay = _lr_and_decay(options)
    first, second = map(float, options.get("betas", (0.9, 0.999)))
    # SparseAdam leaves eps uncorrected, so both corrections go into the rate
    rate = lr * (1 - second**step) ** 0.5 / (1 - first**step)
    # 1 - 0.999 in float32 is off in the fifth digit
    return rate, decay, 1 - first, 1 - second, float(options.get("eps", 1e-8))


def _nothing(options: Options, step: int) -> tuple[float, ...]:
    return ()


RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", 0, 0, _sgd),
        Rule("momentum", 1, 0, _momentum),
        Rule("adagrad", 1, 0, _adagrad),
        Rule("rowwise_adagrad", 0, 1, _adagrad),
        Rule("adam", 2, 0, _adam),
        Rule("add", 0, 0, _nothing),
    )
}
