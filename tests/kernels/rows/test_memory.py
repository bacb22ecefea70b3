# SPDX-License-Identifier: Apache-2.0
"""Reserved memory occupies only the touched pages."""

import errno
import logging
import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from fleetlight.kernels import RowTable
from fleetlight.kernels.rows import memory


def resident() -> int:
    """The resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_reserved_memory_occupies_only_touched_pages() -> None:
    before = resident()
    array = memory.reserve(2**34, np.float32)
    assert array is not None
    assert len(array) == 2**34
    array[: 2**20] = 1
    array[2**33] = 1
    assert array[2**33 - 1] == 0
    assert resident() - before < 4 * 2**20 + 3 * memory.HUGE_PAGES_FROM + 2**20


def test_reserve_returns_none_if_it_fails() -> None:
    assert memory.reserve(2**60, np.float32) is None


def test_populate_makes_pages_resident_and_keeps_their_contents() -> None:
    array = memory.reserve(2**26, np.uint8)
    assert array is not None
    # not at a page boundary
    array[1000] = 7
    before = resident()
    memory.populate(array[1000 : 2**25])
    assert resident() - before > 2**25 - 2 * memory.HUGE_PAGES_FROM - 2**20
    assert array[1000] == 7
    assert array[1001 : 2**25].max() == 0


def test_zeros_are_writable_at_any_size() -> None:
    for count in (0, 1, 1000, 2**20):
        array = memory.zeros(count, np.int64)
        assert len(array) == count
        assert not array.any()
        array[:] = 1


@pytest.mark.slow
def test_tables_work_under_an_address_space_limit() -> None:
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


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that contains an address."""
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(number, 16) for number in first.split("-"))
                inside = low <= address < high
            elif inside and first == "VmFlags:":
                return set(line.split()[1:])
    return set()


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without huge pages"
)
def test_only_large_memory_requests_huge_pages() -> None:
    count = 8 * memory.HUGE_PAGES_FROM
    reserved = memory.reserve(count, np.uint8)
    assert reserved is not None
    for array in (memory.zeros(count, np.uint8), reserved[2 * memory.HUGE_PAGES_FROM :]):
        assert "hg" in flags_at(array.ctypes.data)
    assert "hg" not in flags_at(reserved.ctypes.data)


class Refusing(mmap.mmap):
    """Memory of a kernel without huge pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("kind", ["another system", "refused"])
def test_tables_work_without_huge_pages(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "refused":
        monkeypatch.setattr(mmap, "mmap", Refusing)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    caplog.set_level(logging.DEBUG, memory.__name__)
    ids = np.arange(200_000)
    table = RowTable(8, "sgd", capacity_hint=len(ids))
    numbers = table.insert(ids)
    assert np.array_equal(table.find(ids), numbers)
    # the rows, the part of an id's hash in each, and the index
    assert len(caplog.records) == 3
    assert all("huge pages" in record.getMessage() for record in caplog.records)
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_huge_pages_are_not_mentioned_where_they_work(caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("a kernel without huge pages")
    caplog.set_level(logging.DEBUG, memory.__name__)
    assert memory.reserve(8 * memory.HUGE_PAGES_FROM, np.uint8) is not None
    assert not caplog.records
