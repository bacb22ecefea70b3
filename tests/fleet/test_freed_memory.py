# SPDX-License-Identifier: Apache-2.0
"""Freed large arrays return to the system."""

import subprocess
import sys

import pytest

PROGRAM = """
import threading
import numpy as np
from fleetlight.fleet.bootstrap import LARGE_BYTES, limit_malloc_arenas

SIZE = 4 * LARGE_BYTES

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def work():
    # glibc keeps what it has seen asked for before
    for _ in range(2):
        np.ones(SIZE, np.uint8)

limit_malloc_arenas()
before = resident()
for _ in range(4):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(resident() - before < SIZE // 2)
"""


@pytest.mark.long
@pytest.mark.slow
def test_freed_memory_returns_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "True"
