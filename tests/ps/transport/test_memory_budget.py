# SPDX-License-Identifier: Apache-2.0
"""MemoryBudget: memory that connections share and must claim before use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fleetlight.errors import ProtocolError
from fleetlight.ps.transport.memory.memory_budget import WORTH_BYTES, MemoryBudget, free_memory

MIB = 1 << 20


def test_claimed_memory_is_not_available_to_others() -> None:
    budget = MemoryBudget(lambda: 10 * MIB)
    with (
        budget.claimed(6 * MIB, 1.0),
        pytest.raises(ProtocolError, match=rf"{6 * MIB} bytes are reserved for other frames"),
        budget.claimed(5 * MIB, 0.0),
    ):
        pass
    with budget.claimed(10 * MIB, 0.0):
        pass


def test_a_claim_that_would_fit_alone_waits() -> None:
    budget = MemoryBudget(lambda: 10 * MIB)
    waiting, served = threading.Event(), []

    def wait() -> None:
        waiting.set()
        with budget.claimed(9 * MIB, 30.0):
            served.append("served")

    thread = threading.Thread(target=wait)
    with budget.claimed(5 * MIB, 0.0):
        thread.start()
        assert waiting.wait(30)
        assert not served
    thread.join(30)
    assert served == ["served"]


def test_a_claim_that_never_fits_is_refused_at_once() -> None:
    budget = MemoryBudget(lambda: 10 * MIB)
    with (
        budget.claimed(MIB, 0.0),
        pytest.raises(ProtocolError, match=rf"a body of {11 * MIB} bytes, but only {10 * MIB}"),
        budget.claimed(11 * MIB, 1e6),
    ):
        pass


def test_a_claim_ends_with_its_block_even_after_an_error() -> None:
    budget = MemoryBudget(lambda: MIB)
    for _ in range(3):
        with pytest.raises(KeyError), budget.claimed(MIB, 0.0):
            raise KeyError


def test_small_bodies_and_unknown_budgets_are_not_counted() -> None:
    with (
        MemoryBudget(lambda: 0).claimed(WORTH_BYTES - 1, 0.0),
        MemoryBudget(lambda: None).claimed(1 << 60, 0.0),
    ):
        pass


def write_files(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_of_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_free_memory_comes_from_meminfo(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    write_files(tmp_path, proc__meminfo="MemTotal:  9 kB\nMemAvailable:    5 kB\nX: 1 kB\n")
    assert free_memory(tmp_path) == 5 * 1024


def test_a_container_is_limited_by_its_cgroup(tmp_path: Path) -> None:
    write_files(
        tmp_path, proc__meminfo="MemAvailable:    1000 kB\n", proc__self__cgroup="0::/job\n"
    )
    group = {"memory_of_max": "5000\n", "memory_of_current": "3000\n"}
    stat = {"memory_of_stat": "anon 1\ninactive_file 700\n"}
    write_files(tmp_path / "sys/fs/cgroup/job", **group)
    assert free_memory(tmp_path) == 2000
    write_files(tmp_path / "sys/fs/cgroup/job", **stat)
    assert free_memory(tmp_path) == 2700, "the system forgets files first"
    write_files(tmp_path / "sys/fs/cgroup/job", memory_of_max="max\n")
    assert free_memory(tmp_path) == 1000 * 1024


def test_this_machine_has_free_memory() -> None:
    free = free_memory()
    assert free is None or free > MIB
