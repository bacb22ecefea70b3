# SPDX-License-Identifier: Apache-2.0
"""Read the text of a flag as a value; a wrong one is an ArgumentTypeError."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from fleetlight.launch.job.encryption import MAX_DAYS
from fleetlight.launch.job.options import AUTO


def pair(text: str) -> tuple[str, str]:
    """Read a name and a value, as in NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=VALUE")
    return name.strip(), value


def memory(text: str) -> int:
    """Read a size as MiB."""
    found = re.fullmatch(r"(\d{1,6})([MGT])i?B?", text.strip(), re.IGNORECASE)
    mib = (
        0 if found is None else int(found[1]) * {"M": 1, "G": 1024, "T": 1 << 20}[found[2].upper()]
    )
    if not mib:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a size like 500M or 4G")
    return mib


def _number(least: int, most: int | None, what: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text) if text.isdigit() else -1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {what}")
        return value

    return read


positive = _number(1, None, "a number of at least 1")
count = _number(0, None, "a number of at least 0")
days = _number(0, MAX_DAYS, f"0 to {MAX_DAYS} days")
port = _number(1, 65535, "a port of 1 to 65535")


def count_or_auto(text: str) -> int | str:
    """Read a number of at least 0, or auto."""
    return text if text == AUTO else _number(0, None, "a number of at least 0, or auto")(text)


def seconds(text: str) -> float:
    """Read a time of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds, at least 0")
    return value


def words(text: str) -> tuple[str, ...]:
    """Read names, separated by commas."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a list like a,b")
    return found


def indices(text: str) -> tuple[int, ...]:
    """Read numbers of GPUs, separated by commas."""
    found = words(text)
    if not all(word.isdigit() for word in found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected different GPU numbers like 0,1")
    return tuple(int(word) for word in found)


def machine_range(text: str) -> tuple[int, int]:
    """Read the least and the largest number of machines."""
    low, _, high = text.partition(":")
    high = high or low
    if not (low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected N or MIN:MAX")
    return int(low), int(high)


def endpoint(text: str) -> tuple[str, int]:
    """Read host:port."""
    host, _, number = text.rpartition(":")
    if not host or not number.isdigit() or not 0 < int(number) < 65536:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected host:port")
    return host.strip("[]"), int(number)
