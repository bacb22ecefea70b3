# SPDX-License-Identifier: Apache-2.0
"""A store and a screen that need no other machine."""

from __future__ import annotations


class Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._is_gone = False

    def vanish(self, *, is_gone: bool = True) -> None:
        """From now on nothing answers, as when node 0 has left."""
        self._is_gone = is_gone

    def add(self, key: str, amount: int) -> int:
        self._answer()
        value = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(value).encode()
        return value

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._answer()
        return self.values[key]

    def _answer(self) -> None:
        if self._is_gone:
            raise RuntimeError("connection reset by peer")


class Ears:
    """A screen that only remembers."""

    size = None
    verbose = False

    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, text: str) -> None:
        self.heard.append(text)

    def show(self, data: bytes) -> None:
        raise AssertionError("nothing to show")
