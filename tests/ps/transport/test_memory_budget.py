# SPDX-License-Identifier: Apache-2.0
"""Memory that several connections share: nobody takes what is not there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fleetlight.errors import ProtocolError
from fleetlight.ps.transport.memory_budget import WORTH_BYTES, MemoryBudget, free_memory

MIB = 1 << 20


def test_what_is_claimed_is_not_there_for_others() -> None:
    room = MemoryBudget(lambda: 10 * MIB)
    with (
        room.claimed(6 * MIB, 1.0),
        pytest.raises(ProtocolError, match=rf"{6 * MIB} bytes are reserved for other frames"),
        room.claimed(5 * MIB, 0.0),
    ):
        pass
    with room.claimed(10 * MIB, 0.0):
        pass


def test_who_fits_alone_waits_for_others() -> None:
    room = MemoryBudget(lambda: 10 * MIB)
    waits, waited = threading.Event(), []

    def wait() -> None:
        waits.set()
        with room.claimed(9 * MIB, 30.0):
            waited.append("served")

    thread = threading.Thread(target=wait)
    with room.claimed(5 * MIB, 0.0):
        thread.start()
        assert waits.wait(30)
        assert not waited
    thread.join(30)
    assert waited == ["served"]


def test_what_would_not_fit_alone_is_refused_at_once() -> None:
    room = MemoryBudget(lambda: 10 * MIB)
    with (
        room.claimed(MIB, 0.0),
        pytest.raises(ProtocolError, match=rf"a body of {11 * MIB} bytes, but only {10 * MIB}"),
        room.claimed(11 * MIB, 1e6),
    ):
        pass


def test_claims_end_with_their_block_even_by_an_error() -> None:
    room = MemoryBudget(lambda: MIB)
    for _ in range(3):
        with pytest.raises(KeyError), room.claimed(MIB, 0.0):
            raise KeyError


def test_small_bodies_and_unknown_machines_are_not_counted() -> None:
    with (
        MemoryBudget(lambda: 0).claimed(WORTH_BYTES - 1, 0.0),
        MemoryBudget(lambda: None).claimed(1 << 60, 0.0),
    ):
        pass


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_of_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_the_machine_says_what_is_free(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    machine(tmp_path, proc__meminfo="MemTotal:  9 kB\nMemAvailable:    5 kB\nX: 1 kB\n")
    assert free_memory(tmp_path) == 5 * 1024


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    machine(tmp_path, proc__meminfo="MemAvailable:    1000 kB\n", proc__self__cgroup="0::/job\n")
    group = {"memory_of_max": "5000\n", "memory_of_current": "3000\n"}
    stat = {"memory_of_stat": "anon 1\ninactive_file 700\n"}
    machine(tmp_path / "sys/fs/cgroup/job", **group)
    assert free_memory(tmp_path) == 2000
    machine(tmp_path / "sys/fs/cgroup/job", **stat)
    assert free_memory(tmp_path) == 2700, "the system forgets files first"
    machine(tmp_path / "sys/fs/cgroup/job", memory_of_max="max\n")
    assert free_memory(tmp_path) == 1000 * 1024


def test_this_machine_has_some() -> None:
    free = free_memory()
    assert free is None or free > MIB
