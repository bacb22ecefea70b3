# SPDX-License-Identifier: Apache-2.0
"""The addresses at which the processes of a job listen, from Linux."""

import contextlib
import ipaddress
import os
import struct
from pathlib import Path

_LISTENS = "0A"


def descendants(pid: int) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(stat[1]), []).append(int(folder.name))
    found, left = set(), [pid]
    while left:
        process = left.pop()
        found.add(process)
        left += children.get(process, [])
    return found


def listening(pids: set[int]) -> dict[int, set[str]]:
    """The addresses at which processes listen, `host:port`."""
    by_inode = _listening()
    return {pid: {by_inode[i] for i in _inodes(pid) if i in by_inode} for pid in pids}


def _inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _listening() -> dict[str, str]:
    found = {}
    for file in ("tcp", "tcp6"):
        for line in Path("/proc/net", file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                found[fields[9]] = _address(fields[1])
    return found


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    words = bytes.fromhex(host)
    turned = b"".join(
        struct.pack(">I", *struct.unpack("<I", words[i : i + 4])) for i in range(0, len(words), 4)
    )
    return f"{ipaddress.ip_address(turned)}:{int(port, 16)}"
