# SPDX-License-Identifier: Apache-2.0
"""Loads compiled kernels without starting the compiler.

Before numba loads code from a file it starts its whole compiler: 50 MiB and a third of a second in
every process. Compiled code needs only the addresses of the functions that it calls. LLVM ends the
process when an address is missing, so each object is checked first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

#: a 64-bit little-endian ELF file
_MAGIC = b"\x7fELF\x02\x01"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS = 2  #: the type of the section that lists symbols
#: the linker defines this symbol
_OFFSETS = "_GLOBAL_OFFSET_TABLE_"


def is_ready(kept: Any) -> bool:
    """Whether code can be loaded without the compiler; `kept` is numba's record of a function."""
    try:
        _, kind, data = kept[0]
        if kind != "object":
            return False
        _tell_runtime()
        return not list(_missing(data[0]))
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, struct.error):
        # another version of numba: let it load the code itself
        return False


def _tell_runtime() -> None:
    """Register the functions of numba's runtime with LLVM, as numba does before it compiles."""
    from llvmlite import binding
    from numba.core.runtime import _nrt_python  # type: ignore[attr-defined]

    for name, address in _nrt_python.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def _missing(code: bytes) -> Iterator[str]:
    """The undefined symbols of an object that the process does not have."""
    from llvmlite import binding

    return (name for name in undefined(code) if not binding.address_of_symbol(name))


def undefined(code: bytes) -> Iterator[str]:
    """The undefined symbols of an object."""
    if not code.startswith(_MAGIC):
        raise ValueError("not a 64-bit little-endian ELF object")
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [_SECTION.unpack_from(code, start + number * size) for number in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != _SYMBOLS:
            continue
        names = sections[link][4]
        for name, _, _, where, _, _ in _SYMBOL.iter_unpack(code[offset : offset + length]):
            text = code[names + name : code.index(0, names + name)].decode()
            if where == 0 and text not in ("", _OFFSETS):
                yield text
