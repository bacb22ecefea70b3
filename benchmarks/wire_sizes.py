# SPDX-License-Identifier: Apache-2.0
"""What both sides of the benchmark `wire` agree on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetlight.ps.plan import ASYNC, InitializerPlan, OptimizerPlan, Plan, RulePlan, TablePlan

#: a batch of ids, the width of a row, the ids a table has
IDS, DIM, RESIDENT = 20_000, 16, 1_000_000
#: all dense parameters of a model of 16 M
DENSE_BYTES = 64 << 20


def plan() -> Plan:
    """One table and no dense parameters."""
    table = TablePlan(
        "table", DIM, RulePlan("adagrad", {}), InitializerPlan("uniform", -0.1, 0.1), 0, 0
    )
    return Plan(
        mode=ASYNC,
        worker_num=1,
        server_num=1,
        seed=0,
        tables=[table],
        dense=[],
        optimizers=[OptimizerPlan("torch.optim.adagrad.Adagrad", 1, True)],
    )


def batches(count: int) -> Iterator[NDArray[np.int64]]:
    """Distinct ids of the table, evenly spread."""
    chance = np.random.default_rng(0)
    for _ in range(count):
        yield chance.choice(RESIDENT, IDS, replace=False)


def prepare_raw(connected: socket.socket) -> None:
    """What the transport does to its sockets as well."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
