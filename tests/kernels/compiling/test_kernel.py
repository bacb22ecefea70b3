# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled on their first call, for one signature."""

import subprocess
import sys

import numpy as np
import pytest

from fleetlight.kernels.arrays import Ids, Int64s
from fleetlight.kernels.compiling.kernel import kernel, part


@part
def twice(number: int) -> int:
    """A part of a kernel."""
    return 2 * number


@part
def thrice(number: int) -> int:
    """A part that can replace `twice`."""
    return 3 * number


@kernel
def grow(ids: Ids, out: Int64s) -> int:
    """A kernel that calls a part."""
    for i in range(len(ids)):
        out[i] = twice(ids[i])
    return len(ids)


def test_a_kernel_calls_its_parts() -> None:
    out = np.zeros(3, np.int64)
    assert grow(np.arange(3), out) == 3
    assert out.tolist() == [0, 2, 4]


def test_variants_differ_in_their_parts() -> None:
    out = np.zeros(3, np.int64)
    grow.variant("grow_thrice", twice=thrice)(np.arange(3), out)
    assert out.tolist() == [0, 3, 6]
    grow(np.arange(3), out)
    assert out.tolist() == [0, 2, 4]


def test_read_only_arrays_are_accepted_as_inputs_only() -> None:
    received = np.frombuffer(np.arange(3).tobytes(), np.int64)
    assert not received.flags.writeable
    assert grow(received, np.zeros(3, np.int64)) == 3
    with pytest.raises(TypeError, match="No matching definition"):
        grow(np.arange(3), received)


def test_other_signatures_are_refused() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        grow(np.arange(3.0), np.zeros(3, np.int64))  # type: ignore[arg-type]


def test_kernels_release_the_gil() -> None:
    grow(np.arange(3), np.zeros(3, np.int64))
    assert grow._ready.targetoptions["nogil"]  # type: ignore[union-attr]


@pytest.mark.slow
def test_import_of_kernels_does_not_import_numba() -> None:
    program = "import sys, fleetlight.kernels; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    tables = "; from fleetlight.kernels import RowTable; RowTable(2, 'sgd'); "
    program = program.replace("; assert", tables + "assert")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
