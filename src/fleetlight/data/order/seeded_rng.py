# SPDX-License-Identifier: Apache-2.0
"""`SeededRng`: the same random numbers on every worker, without a trace outside a block."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class SeededRng:
    """A block in which the global generators of torch, NumPy and Python start from `seed`.

    A second block continues where the first one ended. After each block the generators are as
    before it. Generators of GPUs are left alone: samplers and streams run on the CPU.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: Any = None
        self._outside: Any = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self._inside is None:
            _start(self._seed)
        else:
            _restore(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = _states()
        _restore(self._outside)


def _states() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _start(seed: int) -> None:
    # not torch.manual_seed, which also seeds the generators of all GPUs
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
