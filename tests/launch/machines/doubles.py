# SPDX-License-Identifier: Apache-2.0
"""Test doubles: a store and a screen in this process."""

from fleetlight.observe.console import Tone


class Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._is_gone = False

    def vanish(self, *, is_gone: bool = True) -> None:
        """Fail all calls from now on, as when node 0 has left."""
        self._is_gone = is_gone

    def add(self, key: str, amount: int) -> int:
        self._check_reachable()
        value = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(value).encode()
        return value

    def set(self, key: str, value: str) -> None:
        self._check_reachable()
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._check_reachable()
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._check_reachable()
        return self.values[key]

    def _check_reachable(self) -> None:
        if self._is_gone:
            raise RuntimeError("connection reset by peer")


class RecordingScreen:
    """A screen that records its lines."""

    size = None
    verbose = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, tone: Tone = Tone.PLAIN) -> None:
        self.lines.append(text)

    def block(self, text: str) -> None:
        raise AssertionError("nothing to show")

    def show(self, data: bytes) -> None:
        raise AssertionError("nothing to show")
