# SPDX-License-Identifier: Apache-2.0
"""A forked child inherits no connection of the job, and the job continues."""

import os
import threading
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch.utils.data import DataLoader, Dataset

import fleetlight as fleet
from fleetlight.wire.descriptors import open_sockets

pytestmark = pytest.mark.multiprocess


class InheritedState(Dataset[Any]):
    """Records that show what a loading process inherits."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        alive = [t for t in threading.enumerate() if t.name == "fleet-liveness" and t.is_alive()]
        return os.getpid(), len(connections()), len(alive)


def connections() -> list[int]:
    """The TCP sockets of this process."""
    import socket

    found = []
    for fd in open_sockets():
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                found.append(fd)
    return found


def load() -> Any:
    assert connections(), "the worker itself is connected"
    loader = DataLoader(InheritedState(), num_workers=2, multiprocessing_context="fork")
    seen = [tuple(int(v) for v in batch) for batch in loader]
    return os.getpid(), seen, float(fleet.all_reduce(torch.ones(1)))


def test_loading_processes_inherit_no_connections_or_threads() -> None:
    for pid, seen, total in run_workers(load):
        assert len(seen) == 4
        for child, sockets, threads in seen:
            assert child != pid
            assert sockets == 0
            assert threads == 0
        assert total == 2.0
