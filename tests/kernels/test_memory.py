# SPDX-License-Identifier: Apache-2.0
"""Memory that is reserved and not used."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np

from fleetlight.kernels import memory


def resident() -> int:
    """Bytes of memory this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_reserved_memory_costs_what_is_touched() -> None:
    before = resident()
    array = memory.reserve(2**34, np.float32)
    assert array is not None
    assert len(array) == 2**34
    array[: 2**20] = 1
    array[2**33] = 1
    assert array[2**33 - 1] == 0
    assert resident() - before < 4 * 2**20 + 3 * memory.HUGE_PAGES_FROM + 2**20


def test_what_cannot_be_reserved_is_none() -> None:
    assert memory.reserve(2**60, np.float32) is None


def test_zeros_of_any_size() -> None:
    for count in (0, 1, 1000, 2**20):
        array = memory.zeros(count, np.int64)
        assert len(array) == count
        assert not array.any()
        array[:] = 1


def test_a_limit_on_address_space_is_lived_with() -> None:
    program = """
import resource
import numpy as np
from fleetlight.kernels import RowTable
table = RowTable(4, "adagrad")
table.insert([1])  # compile first, that needs more
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
table = RowTable(4, "adagrad")
assert table._slab.capacity == 1024, table._slab.capacity
numbers = table.insert(np.arange(5000))
assert (table.find(np.arange(5000)) == numbers).all()
assert table.ids_of(numbers).tolist() == list(range(5000))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
