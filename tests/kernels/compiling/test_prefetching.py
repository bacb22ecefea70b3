# SPDX-License-Identifier: Apache-2.0
"""Kernels with and without the prefetch instruction."""

import re
from typing import Any

import numpy as np
import pytest

from fleetlight.kernels.arrays import Ids
from fleetlight.kernels.compiling import compiled_files, prefetching
from fleetlight.kernels.compiling.kernel import Kernel, kernel
from fleetlight.kernels.compiling.prefetching import prefetch


def total() -> Kernel[[Ids], int]:
    """Return a new kernel that prefetches."""

    @kernel
    def add_up(ids: Ids) -> int:
        found = 0
        for i in range(len(ids)):
            if i + 4 < len(ids):
                prefetch(ids, np.uint64(i + 4))
            found += ids[i]
        return found

    return add_up


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the state of prefetching after the test."""
    monkeypatch.setattr(prefetching, "_state", dict(prefetching._state))
    # the assembly of cached code cannot be inspected
    monkeypatch.setattr(compiled_files, "keep", lambda *_: None)


def code_of(compiled: Kernel[Any, Any]) -> str:
    assert compiled._ready is not None
    [code] = compiled._ready.inspect_asm().values()  # type: ignore[attr-defined]
    return str(code)


def prefetches(code: str) -> bool:
    """Whether the code has a prefetch instruction of x86 or ARM."""
    return re.search(r"\b(prefetcht0|prfm)\b", code) is not None


@pytest.mark.usefixtures("restored")
def test_kernels_contain_the_instruction() -> None:
    adder = total()
    assert adder(np.arange(10)) == 45
    if prefetching.wanted():
        assert prefetches(code_of(adder))


@pytest.mark.usefixtures("restored")
def test_kernels_omit_the_instruction_after_give_up() -> None:
    prefetching.give_up()
    adder = total()
    assert adder(np.arange(10)) == 45
    assert not prefetches(code_of(adder))


@pytest.mark.slow
@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("error", [RuntimeError, TypeError, AttributeError])
def test_kernels_run_if_the_instruction_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken() -> Any:
        raise error("no such intrinsic")

    prefetching._state["instruction"] = None
    monkeypatch.setattr(prefetching, "_built", broken)
    assert total()(np.arange(10)) == 45
    assert not prefetching.wanted()
