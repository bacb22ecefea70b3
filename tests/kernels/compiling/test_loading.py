# SPDX-License-Identifier: Apache-2.0
"""Kernels that are kept run without the compiler, unless something is missing."""

from __future__ import annotations

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
    """The object of a function that calls another."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    text = f"declare void @{calls}()\ndefine void @f() {{ call void @{calls}()\nret void }}"
    machine = binding.Target.from_default_triple().create_target_machine()
    return bytes(machine.emit_object(binding.parse_assembly(text)))


def kept(code: bytes, kind: str = "object") -> Any:
    return ("f", kind, (code, b"")), None


def test_what_an_object_takes_from_elsewhere() -> None:
    assert list(loading.undefined(compiled("nobody_has_this"))) == ["nobody_has_this"]


def test_ready_when_all_is_there() -> None:
    assert loading.is_ready(kept(compiled("NRT_Free")))


def test_not_ready_when_something_is_missing() -> None:
    assert not loading.is_ready(kept(compiled("nobody_has_this")))


@pytest.mark.parametrize("of", [kept(b"", "bitcode"), kept(b"MZ"), kept(b"\x7fELF"), None, ()])
def test_what_looks_otherwise_is_left_to_numba(of: Any) -> None:
    assert not loading.is_ready(of)


@pytest.mark.slow
def test_a_kept_kernel_does_not_wake_the_compiler() -> None:
    expected = hashing.splitmix64([5])[0]  # kept from now on
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == [str(expected), "False", "42"]
