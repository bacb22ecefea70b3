# SPDX-License-Identifier: Apache-2.0
"""Workers as threads of one process, which meet at barriers: enough of a group for averaging."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

LIMIT_S = 20.0


class Table:
    """Where the workers lay down what each brings, so that all may look at it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._laid: list[Any] = [None] * size

    def exchange(self, index: int, value: T) -> list[T]:
        """Everybody's value, on everybody."""
        self._laid[index] = value
        self._barrier.wait(LIMIT_S)
        everybody = list(self._laid)
        self._barrier.wait(LIMIT_S)
        return everybody


class Worker:
    """A group of these workers, and who takes means for them."""

    device = torch.device("cpu")

    def __init__(self, table: Table, index: int) -> None:
        self._table, self.index, self.size = table, index, table.size
        #: the names in each mean that was taken
        self.means: list[list[str]] = []
        #: how many times worker 0 gave tensors to all
        self.broadcasts = 0

    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        self.means.append(list(named))
        mine = {name: tensor.detach().clone() for name, tensor in named.items()}
        everybody = self._table.exchange(self.index, mine)
        assert all(list(one) == list(named) for one in everybody)
        for name, tensor in named.items():
            tensor.copy_(torch.stack([one[name] for one in everybody]).mean(0))

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        return self._table.exchange(self.index, data)

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        assert op == "max"
        everybody = self._table.exchange(self.index, tensor.clone())
        return tensor.copy_(torch.stack(everybody).amax(0))

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        self.broadcasts += 1
        first = self._table.exchange(self.index, [tensor.clone() for tensor in tensors])[0]
        for tensor, value in zip(tensors, first, strict=True):
            tensor.copy_(value)


def together(function: Callable[[Any], T], workers: int = 2) -> list[T]:
    """Call a function in each worker; answers what they returned."""
    table = Table(workers)
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda i: function(Worker(table, i)), range(workers)))
