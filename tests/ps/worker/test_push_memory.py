# SPDX-License-Identifier: Apache-2.0
"""Dense gradients of a push are written at their place in a slot, behind the arrays of tables."""

from __future__ import annotations

import mmap
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.kernels.batches import numbers
from tests.ps.serving import DIM, OPTIONS, plan
from tests.ps.worker.in_process_job import InProcessJob

from fleetlight.kernels import dedup
from fleetlight.ps.plan import BF16, FP32, DensePlan
from fleetlight.ps.transport.memory.body_slots import BodySlots, file_bytes
from fleetlight.ps.transport.protocol import _laid_out, _places, _spec, views
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.wire_forms import FP16, INT8
from fleetlight.ps.worker.local_parameters import LocalParameters

SLOT = 256 << 10
DENSE = 9001


def job_with(wire: str) -> InProcessJob:
    tables = [msgspec.structs.replace(table, wire=wire) for table in plan().tables]
    dense = [
        DensePlan("weight", (DENSE,), "float32", 0, 0),
        DensePlan("bias", (DENSE,), "bfloat16", 0, 0),
    ]
    job = InProcessJob(2, tables=tables, dense=dense)
    job.live = LocalParameters([torch.ones(DENSE), torch.ones(DENSE, dtype=torch.bfloat16)])
    return job


def part_of(ids: Any, counted: bool) -> TableGradients:
    distinct = dedup(ids, 2)
    count = len(distinct.ids)
    counts = np.ones(count, np.float32) if counted else None
    gradients = numbers(count, count, DIM)
    return TableGradients(distinct.ids, distinct.starts, gradients, counts, counts)


def update_of(tables: dict[int, TableGradients]) -> Update:
    dense: dict[int, Any] = {
        0: np.arange(DENSE, dtype=np.float32),
        1: np.arange(DENSE, dtype=np.uint16),
    }
    return Update(0, 0, OPTIONS, tables, dense)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("wire", [FP32, BF16, FP16, INT8])
@pytest.mark.parametrize("counts", [(), (0,), (41,), (3, 1000), (1, 0)])
def test_dense_gradients_are_written_at_their_place(
    counts: tuple[int, ...], wire: str, counted: bool
) -> None:
    job = job_with(wire)
    tables = {n: part_of(np.arange(count), counted) for n, count in enumerate(counts)}
    memories = [mmap.mmap(-1, file_bytes(SLOT)) for _ in range(2)]
    slots = [BodySlots(memory, SLOT, is_client=True) for memory in memories]
    for server, channel in enumerate(job.client.open_lane("push")):
        channel.output = slots[server].output  # type: ignore[method-assign]
    update = update_of(tables)
    memory = job.client.push_memory(update)
    push = job.client.build_push(update, job.live, memory=memory)
    plain = job.client.build_push(update, job.live)
    requests = job.client._push_requests(push, phase=0)
    expected = job.client._push_requests(plain, phase=0)
    for server, (_, arrays) in requests.items():
        parts, size = _laid_out(arrays)
        # 0 if an array in the slot is not at its place
        number = slots[server].fill(parts, size)
        assert number > 0, f"{size} bytes"
        for block in push.blocks[server]:
            assert np.may_share_memory(block, slots[server]._outgoing[number - 1])
        places, _ = _places(_spec(n, array) for n, array in enumerate(arrays))
        received = BodySlots(memories[server], SLOT, is_client=False).take(number, size)
        for array, other in zip(views(places, received), expected[server][1], strict=True):
            np.testing.assert_array_equal(array, other)


def test_a_server_without_dense_blocks_gives_no_memory_early() -> None:
    """Arrays of tables are copied in any case, and checking their places takes time."""
    job = InProcessJob(2)
    slots = [BodySlots(mmap.mmap(-1, file_bytes(SLOT)), SLOT, is_client=True) for _ in range(2)]
    for server, channel in enumerate(job.client.open_lane("push")):
        channel.output = slots[server].output  # type: ignore[method-assign]
    job.client.push_memory(Update(0, 0, OPTIONS, {0: part_of(np.arange(9), False)}, {}))
    is_dense = [bool(job.client.placement.blocks_of(server)) for server in range(2)]
    assert sorted(is_dense) == [False, True]
    assert [one._begun is not None for one in slots] == is_dense
