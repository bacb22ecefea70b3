# SPDX-License-Identifier: Apache-2.0
"""Cached kernels load without the compiler, unless a symbol is missing."""

import subprocess
import sys
from typing import Any

import pytest
from llvmlite import binding

from fleetlight.kernels.compiling import loading
from fleetlight.kernels.ids import hashing

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
