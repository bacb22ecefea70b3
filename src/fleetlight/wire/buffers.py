# SPDX-License-Identifier: Apache-2.0
"""Buffers as a socket or a file takes them, and what is left after a partial write."""

from __future__ import annotations

#: bytes, or a view of an array's memory
Buffer = bytes | memoryview


def without(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after so many bytes."""
    for number, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[number + 1 :]]
        done -= len(buffer)
    return []
