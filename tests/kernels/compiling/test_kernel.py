# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled on their first call, for one signature."""

# a kernel is compiled from the text of its annotations
from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from llvmlite import binding

from fleetlight.kernels.arrays import Ids, Int64s
from fleetlight.kernels.compiling import compiled_files, loading, prefetching
from fleetlight.kernels.compiling.kernel import Kernel, kernel, part
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.ids import hashing


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


# -- cached kernels load without the compiler, unless a symbol is missing -------------------------

PROGRAM = """
import sys
from fleetlight.kernels.ids import hashing
print(hashing.splitmix64([5])[0], "numba.np.arrayobj" in sys.modules)
import numba
print(numba.njit(lambda x: 2 * x)(21))
"""


def compiled(calls: str) -> bytes:
    """The object code of a function that calls `calls`."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    text = f"declare void @{calls}()\ndefine void @f() {{ call void @{calls}()\nret void }}"
    machine = binding.Target.from_default_triple().create_target_machine()
    return bytes(machine.emit_object(binding.parse_assembly(text)))


def kept(code: bytes, kind: str = "object") -> Any:
    return ("f", kind, (code, b"")), None


def test_undefined_lists_external_symbols() -> None:
    assert list(loading.undefined(compiled("missing_symbol"))) == ["missing_symbol"]


def test_code_is_ready_if_all_symbols_exist() -> None:
    assert loading.is_ready(kept(compiled("NRT_Free")))


def test_code_is_not_ready_if_a_symbol_is_missing() -> None:
    assert not loading.is_ready(kept(compiled("missing_symbol")))


@pytest.mark.parametrize("of", [kept(b"", "bitcode"), kept(b"MZ"), kept(b"\x7fELF"), None, ()])
def test_other_records_are_not_ready(of: Any) -> None:
    assert not loading.is_ready(of)


@pytest.mark.slow
def test_cached_kernel_does_not_import_the_compiler() -> None:
    expected = hashing.splitmix64([5])[0]  # fills the cache
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == [str(expected), "False", "42"]


# -- kernels with and without the prefetch instruction --------------------------------------------


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
