# SPDX-License-Identifier: Apache-2.0
"""Two machines with a cable between them, made of network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

ADDRESSES = ("10.213.7.1", "10.213.7.2")

#: marks of tests that need them
NEEDED = [
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="needs root and the ip command to make network namespaces",
    ),
]


def ip(*words: str) -> None:
    """Call the `ip` command."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Two namespaces: the first has one end of a cable, `cable0`, the second has `cable1`."""
    names = (f"fleet{os.getpid()}a", f"fleet{os.getpid()}b")
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"cannot make network namespaces: {error.stderr!r}")
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1",
           "netns", names[1])  # fmt: skip
        for number, name in enumerate(names):
            cable = f"cable{number}"
            ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", cable)
            for device in ("lo", cable):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
