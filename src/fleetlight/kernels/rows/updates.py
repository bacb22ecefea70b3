# SPDX-License-Identifier: Apache-2.0
"""The rules of `kernels/rules` by name, and the kernel of each rule that updates many rows."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from typing import TypeAlias

import numpy as np

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.kernels import rules
from fleetlight.kernels.arrays import Doubles, Floats, Ids, Values
from fleetlight.kernels.compiling.kernel import Kernel, kernel, part
from fleetlight.kernels.rows.row_access import ahead, ask
from fleetlight.kernels.rule import Numbers, Options, Rule, Step

Update: TypeAlias = Kernel[[Floats, int, Ids, Values, int, Doubles], None]


def find_rules() -> dict[str, Rule]:
    """Every rule of the package `rules`, by name."""
    names = [f"{rules.__name__}.{module.name}" for module in pkgutil.iter_modules(rules.__path__)]
    found: list[Rule] = [importlib.import_module(name).RULE for name in names]
    return {rule.name: rule for rule in found}


RULES = find_rules()


def rule_named(name: str, options: Options | None = None) -> Rule:
    """The rule with this name; `options` may set the initial accumulator."""
    if name not in RULES:
        raise ConfigError(f"rule {name!r}: {did_you_mean(name, RULES)}")
    rule = RULES[name]
    initial = (options or {}).get(rule.initial_option, rule.initial)
    return dataclasses.replace(rule, initial=float(initial))


@functools.cache
def update_by(name: str, step: Step) -> Update:
    """The kernel that applies `step`, the arithmetic of the rule `name`."""
    return _update.variant(f"update_by_{name}", bound_step=step)


@part
def bound_step(
    slab: Floats, at: np.uint64, dim: np.uint64, grads: Values, g: np.uint64, h: Numbers
) -> None:
    """The step of a rule, which each variant of an update kernel binds."""


@part
def numbers_of(hyper: Doubles) -> Numbers:
    """The hyper-parameters as a step takes them."""
    return (
        np.float32(hyper[0]),
        np.float32(hyper[1]),
        np.float32(hyper[2]),
        np.float32(hyper[3]),
        np.float32(hyper[4]),
    )


@kernel
def _update(
    slab: Floats, width: int, numbers: Ids, grads: Values, dim: int, hyper: Doubles
) -> None:
    """Update row numbers[i] by gradient i; numbers must be distinct."""
    h = numbers_of(hyper)
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            ask(slab, np.uint64(numbers[i + early]) * np.uint64(width), width)
        at = np.uint64(numbers[i]) * np.uint64(width)
        bound_step(slab, at, np.uint64(dim), grads, np.uint64(i) * np.uint64(dim), h)
