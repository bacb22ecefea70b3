# SPDX-License-Identifier: Apache-2.0
"""SeededRng that is the same on every worker, and that nobody else notices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class SeededRng:
    """While inside, the global generators of torch, NumPy and Python go on from `seed`.

    Outside they are what they were. Only the CPU's: orders and streams of records are made there.
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
            _go_on(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = _states()
        _go_on(self._outside)


def _states() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _go_on(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _start(seed: int) -> None:
    # not torch.manual_seed, which would start the generators of all GPUs anew as well
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
