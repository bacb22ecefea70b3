# SPDX-License-Identifier: Apache-2.0
"""Copies to and from a device: their values, and on a GPU the order of the queued work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fleetlight.ps.layers import staging
from fleetlight.ps.layers.staging import BlockingStaging, CudaStaging, staging_of

CPU = torch.device("cpu")


def test_blocking_copies_are_independent_of_their_source() -> None:
    copies, array = BlockingStaging(CPU), np.arange(3, dtype=np.float32)
    array.flags.writeable = False
    there = copies.to_device(array)
    arrival = copies.to_host(there)
    there += 1
    assert arrival().tolist() == [0.0, 1.0, 2.0]
    assert array.tolist() == [0.0, 1.0, 2.0]
    target = torch.zeros(3)
    copies.write(target, there)
    assert target.tolist() == [1.0, 2.0, 3.0]


def test_each_device_has_its_copies() -> None:
    assert staging_of(CPU) is staging_of(CPU)
    assert isinstance(staging_of(CPU), BlockingStaging)


class Stream:
    """Records what is queued on it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Stream:
        self._log.append(f"event in {self.name}")
        return self

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What copies queue on a GPU, whose tensors are in main memory."""
    log: list[str] = []
    names = iter(["in", "out"])
    compute = Stream(log, "compute")

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}:")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(staging, "_pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))

    def keep(tensor: Tensor, stream: Any) -> None:
        log.append(f"memory kept for {stream.name}")

    monkeypatch.setattr(Tensor, "record_stream", keep)
    return log


def test_work_on_the_gpu_waits_for_copied_rows(queued: list[str]) -> None:
    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    array.flags.writeable = False
    assert CudaStaging(CPU).to_device(array).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert queued == ["on in:", "compute waits for in", "memory kept for compute"]


def test_the_copy_of_gradients_follows_their_computation(queued: list[str]) -> None:
    arrival = CudaStaging(CPU).to_host(torch.ones(2))
    before = ["out waits for compute", "on out:", "event in out", "memory kept for out"]
    assert queued == before
    assert arrival().tolist() == [1.0, 1.0]
    assert queued == [*before, "host waits for out"]


def test_parameters_are_written_in_the_order_of_the_computation(queued: list[str]) -> None:
    target = torch.zeros(2, dtype=torch.bfloat16)
    CudaStaging(CPU).write(target, torch.ones(2, dtype=torch.bfloat16))
    assert target.tolist() == [1.0, 1.0]
    assert queued == []
