# SPDX-License-Identifier: Apache-2.0
"""Workers as threads of one process, with the group operations that averaging needs."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

LIMIT_S = 20.0


class Exchange:
    """Exchanges values between all workers, with two barriers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def exchange(self, index: int, value: T) -> list[T]:
        """Returns the values of all workers on each worker."""
        self._values[index] = value
        self._barrier.wait(LIMIT_S)
        gathered = list(self._values)
        self._barrier.wait(LIMIT_S)
        return gathered


class Worker:
    """One worker's group, which also averages."""

    device = torch.device("cpu")

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange, self.index, self.size = exchange, index, exchange.size
        #: the names in each mean so far
        self.means: list[list[str]] = []
        #: how many times worker 0 broadcast tensors
        self.broadcasts = 0

    def mean(self, named: Mapping[str, Tensor], operation: str) -> None:
        self.means.append(list(named))
        mine = {name: tensor.detach().clone() for name, tensor in named.items()}
        gathered = self._exchange.exchange(self.index, mine)
        assert all(list(one) == list(named) for one in gathered)
        for name, tensor in named.items():
            tensor.copy_(torch.stack([one[name] for one in gathered]).mean(0))

    def gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        return self._exchange.exchange(self.index, data)

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        assert op == "max"
        gathered = self._exchange.exchange(self.index, tensor.clone())
        return tensor.copy_(torch.stack(gathered).amax(0))

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        self.broadcasts += 1
        first = self._exchange.exchange(self.index, [tensor.clone() for tensor in tensors])[0]
        for tensor, value in zip(tensors, first, strict=True):
            tensor.copy_(value)


def together(function: Callable[[Any], T], workers: int = 2) -> list[T]:
    """Calls a function in each worker; returns the results."""
    exchange = Exchange(workers)
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda i: function(Worker(exchange, i)), range(workers)))
